"""The labelled data that a user brings as ``.npz`` files: one array for each input of the models, and ``labels``.

Each array is (N, …); nothing in a file is ever unpickled. What the files of one task must have in common is
:mod:`cloud_server.tasks`' matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.bundle import open_regular
from edge_sdk.errors import InvalidInputError, SplitfleetError
from zoo_keras.samples import Samples

LABELS = "labels"
NUMBERS = "biuf"

Array = npt.NDArray[Any]


def read_labelled(path: Path) -> Samples:
    """The inputs and labels in ``path``.

    Raises :class:`InvalidInputError` naming the file and what is wrong in it.
    """
    arrays = _read(path)
    labels = arrays.pop(LABELS, None)
    if labels is None:
        raise InvalidInputError(f"{path}: has no array {LABELS!r}; it has: {', '.join(arrays) or 'none'}")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise InvalidInputError(
            f"{path}: {LABELS!r} must be whole numbers of shape (samples,), got {labels.dtype} of shape "
            f"{list(labels.shape)}"
        )
    if len(labels) and int(labels.min()) < 0:
        raise InvalidInputError(f"{path}: {LABELS!r} has the negative label {int(labels.min())}; classes count from 0")
    _check(path, arrays | {LABELS: labels})
    return Samples(inputs=arrays, labels=labels.astype(np.int64))


def read_inputs(path: Path) -> dict[str, Array]:
    """The inputs in ``path``, without labels if it has any. Raises :class:`InvalidInputError`."""
    return read_samples(path)[0]


def read_samples(path: Path) -> tuple[dict[str, Array], bool]:
    """The inputs in ``path``, and whether there are labels with them. Raises :class:`InvalidInputError`."""
    arrays = _read(path)
    labelled = arrays.pop(LABELS, None) is not None
    _check(path, arrays)
    return arrays, labelled


def _check(path: Path, arrays: Mapping[str, Array]) -> None:
    if not set(arrays) - {LABELS}:
        raise InvalidInputError(f"{path}: has no inputs; expected one array for each input of the model, by its name")
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        told = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
        raise InvalidInputError(f"{path}: expected the same number of samples in each array, at least one; {told}")
    for name, array in arrays.items():
        if array.dtype.kind not in NUMBERS:
            raise InvalidInputError(f"{path}: {name!r} has dtype {array.dtype}; expected numbers")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidInputError(f"{path}: {name!r} holds NaN or infinity")


def _read(path: Path) -> dict[str, Array]:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InvalidInputError(f"{path}: is one array; expected an .npz file with an array for each input")
            arrays = {name: archive[name] for name in archive.files}
    except SplitfleetError:
        raise
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except MemoryError:
        raise InvalidInputError(f"{path}: does not fit into the memory of this machine") from None
    except Exception as error:  # numpy and zipfile raise whatever the file provokes
        raise _no_npz(path, str(error).partition("\n")[0] or type(error).__name__) from None
    # What is no array is returned as it is.
    other = next((name for name, array in arrays.items() if not isinstance(array, np.ndarray)), None)
    if other is not None:
        raise _no_npz(path, f"it holds {other!r}, which is no array")
    return arrays


def _no_npz(path: Path, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{path}: is no .npz file of plain arrays ({reason}); "
        "write it with numpy.savez_compressed(path, image=..., labels=...)"
    )
