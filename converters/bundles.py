"""A bundle, built: the head's file, the tail's files and the manifest that describes both.

Whether it was built before is :mod:`converters.cache`'s matter, in which process :mod:`converters.workshop`'s.
"""

from __future__ import annotations

import math
from pathlib import Path

from converters.calibration import Calibration
from converters.flatten import FlatModel
from converters.head import Head, input_keys
from converters.head_choice import ChosenHead, choose_head, output_keys
from converters.memory import operation_memory
from converters.peak import predicted_peaks
from converters.precision import Attempt
from converters.quantization import Quantization, int8_of_range
from converters.split import Split, split
from converters.tail import write_tail
from converters.versions import versions
from edge_sdk.bundle import Bundle, file_sha256
from edge_sdk.manifest import (
    HEAD_FILE,
    MANIFEST_FILE,
    CrossingSpec,
    Cut,
    FileEntry,
    InputSpec,
    Manifest,
    ModelRef,
    OutputSpec,
    Precision,
    SelfCheck,
)
from edge_sdk.runtime import Interpreter
from edge_sdk.self_check import observe, self_check_inputs

SELF_CHECK_SEED = 1
INPUT_CUT_NAME = "input"


def build_bundle(
    flat: FlatModel,
    k: int,
    calibration: Calibration,
    *,
    task: str,
    model: ModelRef,
    folder: Path,
    precision: Precision = "int8",
    max_error: float = math.inf,
    before: str = "",
    tail_tflite_failed: str = "",
) -> Bundle:
    """Build the bundle of ``flat`` cut after operation ``k`` in the empty ``folder``.

    ``k == 0`` makes a cloud-only one, ``k == n`` an edge-only one. ``precision``, ``max_error`` and ``before`` are
    those of :class:`converters.precision.Attempt`; ``tail_tflite_failed`` is why the tail need not be a TensorFlow Lite
    model, too. Raises :class:`IllegalCutError`, and :class:`ConversionError` for a head that cannot be made or is not
    good enough.
    """
    graph = flat.graph
    halves = split(flat, k)
    attempt = Attempt(k=k, precision=precision, max_error=max_error, before=before)
    chosen = (
        ChosenHead(head=None, precision=precision, reason="", sent={})
        if halves.head is None
        else choose_head(halves, calibration, folder / HEAD_FILE, attempt)
    )
    head = chosen.head
    inputs = _inputs(flat, head, calibration)
    crossing = _crossing(halves, flat, inputs, chosen)
    tail_tflite_reason = ""
    if halves.tail is not None:
        keys = output_keys(halves.tail_outputs)
        tail_tflite_reason = write_tail(halves.tail, crossing, keys, folder, tail_tflite_failed)
    manifest = Manifest(
        task=task,
        model=model,
        cut=Cut(k=k, n=graph.n, name=graph.operations[k - 1].name if k else INPUT_CUT_NAME),
        precision=chosen.precision,
        inputs=inputs,
        crossing=crossing,
        outputs=_outputs(halves, flat, head),
        files=_files(folder),
        self_check=None if head is None else _self_check(folder / HEAD_FILE, inputs),
        cumulative_bytes=operation_memory(graph, chosen.precision)[k - 1].cumulative_bytes if k else 0,
        predicted_peak_bytes=predicted_peaks(flat, k, chosen.precision) if k else {},
        versions=versions(),
        precision_reason=chosen.reason,
        tail_tflite_reason=tail_tflite_reason,
    )
    (folder / MANIFEST_FILE).write_bytes(manifest.canonical())
    return Bundle.open(folder)


def _inputs(flat: FlatModel, head: Head | None, calibration: Calibration) -> tuple[InputSpec, ...]:
    """As the head takes them; without a head as the raw input travels: int8 where it is a floating-point number."""
    specs = []
    for position, key, samples in zip(
        flat.graph.inputs, input_keys(len(flat.graph.inputs)), calibration.inputs, strict=True
    ):
        tensor = flat.graph.tensors[position]
        if head is not None:
            quantization = head.inputs[key]
        else:
            quantization = int8_of_range(samples) if tensor.is_float else Quantization(dtype=tensor.dtype)
        specs.append(
            InputSpec(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                scale=quantization.scale,
                zero_point=quantization.zero_point,
            )
        )
    return tuple(specs)


def _crossing(
    halves: Split, flat: FlatModel, inputs: tuple[InputSpec, ...], chosen: ChosenHead
) -> tuple[CrossingSpec, ...]:
    specs = []
    for number, position in enumerate(halves.crossing if halves.tail is not None else ()):
        tensor = flat.graph.tensors[position]
        name = f"feature_{number}"
        if chosen.head is not None:
            sent = chosen.sent[name]
        else:
            spec = inputs[number]
            dtype = spec.dtype if spec.scale is None else "int8"
            sent = Quantization(dtype=dtype, scale=spec.scale, zero_point=spec.zero_point)
        specs.append(
            CrossingSpec(
                name=name,
                source=tensor.source,
                shape=tensor.shape,
                dtype=sent.dtype,
                scale=sent.scale,
                zero_point=sent.zero_point,
            )
        )
    return tuple(specs)


def _outputs(halves: Split, flat: FlatModel, head: Head | None) -> tuple[OutputSpec, ...]:
    specs = []
    for place, (position, name) in enumerate(zip(flat.graph.outputs, flat.graph.output_names, strict=True)):
        tensor = flat.graph.tensors[position]
        in_head = head is not None and place in halves.head_outputs
        sent = head.outputs[f"output_{place}"] if head is not None and in_head else Quantization(dtype="float32")
        specs.append(
            OutputSpec(
                name=name,
                side="head" if in_head else "tail",
                shape=tensor.shape,
                # The tail answers in float32, which holds integers up to 2^24; the device gives them back as such.
                dtype="float32" if tensor.is_float else tensor.dtype,
                scale=sent.scale,
                zero_point=sent.zero_point,
            )
        )
    return tuple(specs)


def _files(folder: Path) -> tuple[FileEntry, ...]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(
        FileEntry(path=path.relative_to(folder).as_posix(), sha256=file_sha256(path), size_bytes=path.stat().st_size)
        for path in paths
    )


def _self_check(path: Path, inputs: tuple[InputSpec, ...]) -> SelfCheck:
    outputs = Interpreter(path).run(self_check_inputs(inputs, SELF_CHECK_SEED))
    return SelfCheck(seed=SELF_CHECK_SEED, expected=observe(outputs))
