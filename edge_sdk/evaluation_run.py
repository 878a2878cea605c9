"""A run of inferences that the server asks of a device: validation inputs from disk in, all outputs and times out.

The inputs are ``.npy`` files that are mapped, not read: a device need not hold a validation set in memory. Labels never
come here. Fetching and reporting are :mod:`edge_sdk.agent`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_sdk.errors import InvalidInputError
from edge_sdk.inference import Inference
from edge_sdk.manifest import Manifest
from edge_sdk.protocol import Run, RunReport
from edge_sdk.wire import Tensor

MAX_WINDOW = 64
_TIMES = ("edge_s", "transfer_s", "cloud_s")

Array = npt.NDArray[Any]


def open_inputs(run: Run, manifest: Manifest, files: Mapping[str, Path]) -> dict[str, Array]:
    """The validation inputs by name, each (N, …), mapped from disk.

    Raises :class:`InvalidInputError` when they are not those of the model, or hold fewer samples than ``run`` asks for.
    """
    arrays: dict[str, Array] = {}
    for spec in manifest.inputs:
        try:
            array = np.load(files[spec.name], mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InvalidInputError(
                f"input {spec.name!r}: blob {run.inputs[spec.name]} is no .npy file: {error}"
            ) from None
        if array.shape[1:] != spec.shape:
            raise InvalidInputError(
                f"input {spec.name!r}: expected samples of shape {list(spec.shape)}, got {list(array.shape[1:])}"
            )
        if run.first + run.count > len(array):
            raise InvalidInputError(
                f"input {spec.name!r}: has {len(array)} samples, {run.first} to {run.first + run.count} were asked for"
            )
        arrays[spec.name] = array
    return arrays


def check_run(run: Run, manifest: Manifest) -> None:
    """Raises :class:`InvalidInputError` for a run that makes no sense for the bundle."""
    names = {spec.name for spec in manifest.inputs}
    if set(run.inputs) != names:
        raise InvalidInputError(f"device.run: expected inputs {sorted(names)}, got {sorted(run.inputs)}")
    if run.first < 0 or run.count < 1 or run.warmup < 0 or not 1 <= run.window <= MAX_WINDOW:
        raise InvalidInputError(
            f"device.run: first {run.first}, count {run.count}, warmup {run.warmup}, window {run.window} is no run: "
            f"count must be positive, window 1 to {MAX_WINDOW}"
        )


def execute(
    run: Run, inference: Inference, inputs: Mapping[str, Array], manifest: Manifest, progress: Callable[[], None]
) -> tuple[RunReport, list[Tensor]]:
    """Infer the samples of ``run``; ``progress`` is called after each and may raise to break off.

    Raises what :meth:`Inference.infer` raises: one failed request ends the run.
    """

    def samples(count: int) -> Iterator[dict[str, Array]]:
        for number in range(count):
            row = run.first + number % run.count
            yield {name: array[row] for name, array in inputs.items()}

    for _ in inference.infer_many(samples(run.warmup), run.window):
        progress()
    outputs = [np.empty((run.count, *spec.shape), np.float32) for spec in manifest.outputs]
    times = {name: np.empty(run.count) for name in _TIMES}
    sent_bytes = received_bytes = 0
    for row, reply in enumerate(inference.infer_many(samples(run.count), run.window)):
        for array, spec in zip(outputs, manifest.outputs, strict=True):
            array[row] = reply.outputs[spec.name]
        for name, values in times.items():
            values[row] = getattr(reply.timing, name)
        sent_bytes += reply.sent_bytes
        received_bytes += reply.received_bytes
        progress()
    report = RunReport(
        bundle=run.bundle,
        runtime=inference.runtime,
        count=run.count,
        sent_bytes=sent_bytes / run.count,
        received_bytes=received_bytes / run.count,
    )
    tensors = [Tensor(name=f"output_{number}", data=array) for number, array in enumerate(outputs)]
    tensors += [Tensor(name=name, data=values) for name, values in times.items()]
    return report, tensors
