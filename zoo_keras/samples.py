"""The small labelled sets that ship with the package, so that calibration and evaluation need no download.

`calibration` is drawn from the training images; `validation` (what an allocator decides on) and `test` (what is
reported once) are disjoint halves of 2,000 images drawn from the test images. All three hold every class equally often.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.errors import ConfigError
from zoo_keras.data import FullDataset, Labels

SPLITS = ("calibration", "validation", "test")
CALIBRATION_PER_CLASS = 50
EVALUATION_PER_CLASS = 100
DRAW_SEED = 20170825


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """`inputs` maps each input name of the models to an array (N, …); `labels` is int64 (N,)."""

    inputs: Mapping[str, npt.NDArray[Any]]
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and bytes of all arrays; the same data always has the same digest."""
        sha256 = hashlib.sha256()
        for name, array in (*sorted(self.inputs.items()), ("labels", self.labels)):
            sha256.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            sha256.update(np.ascontiguousarray(array).tobytes())
        return sha256.hexdigest()


def load_samples(directory: Path, split: str) -> Samples:
    """The shipped set `split` from a task's asset directory; `ConfigError` when it is none of `SPLITS` or missing."""
    if split not in SPLITS:
        raise ConfigError(f"there is no split {split!r}; the splits are: {', '.join(SPLITS)}")
    path = directory / f"{split}.npz"
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Samples(inputs={"image": archive["image"]}, labels=archive["labels"])
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: install the package again") from None


def draw_samples(full: FullDataset) -> dict[str, tuple[Samples, npt.NDArray[np.int64]]]:
    """The three sets, each with the positions of its images in the part of the full data set it was drawn from."""
    rng = np.random.default_rng(DRAW_SEED)
    calibration = _per_class(rng, full.train_labels, CALIBRATION_PER_CLASS)
    evaluation = _per_class(rng, full.test_labels, 2 * EVALUATION_PER_CLASS)
    drawn = {
        "calibration": (full.train_images, full.train_labels, calibration),
        "validation": (full.test_images, full.test_labels, evaluation[:, :EVALUATION_PER_CLASS]),
        "test": (full.test_images, full.test_labels, evaluation[:, EVALUATION_PER_CLASS:]),
    }
    result = {}
    for split, (images, labels, by_class) in drawn.items():
        positions = rng.permutation(by_class.ravel())
        result[split] = (Samples(inputs={"image": images[positions]}, labels=labels[positions]), positions)
    return result


def ship_samples(full: FullDataset, directory: Path) -> None:
    """Draw the three sets and write `<split>.npz` (image, labels, source_index) into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, (samples, positions) in draw_samples(full).items():
        np.savez_compressed(
            directory / f"{split}.npz",
            image=samples.inputs["image"],
            labels=samples.labels,
            source_index=positions,
        )


def _per_class(rng: np.random.Generator, labels: Labels, count: int) -> npt.NDArray[np.int64]:
    """Positions of `count` random samples of every class, int64 (classes, count), none twice."""
    classes = int(labels.max()) + 1
    return np.stack([rng.permutation(np.flatnonzero(labels == label))[:count] for label in range(classes)])
