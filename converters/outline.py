"""The outline of a model: what is known of it without Keras, to choose a cut by. It is cached as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from converters.cuts import CutPoint, cut_points
from converters.graph import Graph, TensorInfo
from converters.memory import OperationMemory, operation_memory
from converters.precision import PRECISIONS
from edge_sdk.manifest import Precision


@dataclass(frozen=True, kw_only=True)
class Outline:
    """``model_sha256`` covers architecture and weights; ``n`` is the number of operations.

    ``inputs`` and ``outputs`` are the model's, in its order, outputs by the names that the user knows.
    ``edge_only_reason`` says why no device can run the whole model, and is empty where one can. ``operations`` are 1 to
    n, ``cuts`` 1 to n - 1.

    What the head needs that ends after each operation, 1 to n, by its precision: ``cumulative_bytes`` by the classic
    rule (:mod:`converters.memory`), ``peak_bytes``, by the name of a TFLite runtime, as predicted
    (:mod:`converters.peak`).
    """

    model_sha256: str
    n: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    edge_only_reason: str
    operations: tuple[OperationMemory, ...]
    cuts: tuple[CutPoint, ...]
    cumulative_bytes: Mapping[Precision, tuple[int, ...]]
    peak_bytes: Mapping[Precision, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: Graph,
        model_sha256: str,
        peak_bytes: Mapping[Precision, Mapping[str, tuple[int, ...]]] = MappingProxyType({}),
    ) -> Outline:
        """The outline of a graph."""
        outputs = zip(graph.outputs, graph.output_names, strict=True)
        return cls(
            model_sha256=model_sha256,
            n=graph.n,
            inputs=tuple(graph.tensors[position] for position in graph.inputs),
            outputs=tuple(dataclasses.replace(graph.tensors[position], name=name) for position, name in outputs),
            edge_only_reason=graph.obstacle(graph.n),
            operations=operation_memory(graph),
            cuts=cut_points(graph),
            cumulative_bytes={
                precision: tuple(operation.cumulative_bytes for operation in operation_memory(graph, precision))
                for precision in PRECISIONS
            },
            peak_bytes=dict(peak_bytes),
        )

    def to_json(self) -> str:
        """What :meth:`from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outline:
        """Raises ``ValueError``, ``TypeError`` or ``KeyError`` when ``text`` is not what :meth:`to_json` wrote."""
        document = json.loads(text)
        return cls(
            model_sha256=document["model_sha256"],
            n=document["n"],
            inputs=tuple(_tensor(entry) for entry in document["inputs"]),
            outputs=tuple(_tensor(entry) for entry in document["outputs"]),
            edge_only_reason=document["edge_only_reason"],
            operations=tuple(OperationMemory(**entry) for entry in document["operations"]),
            cuts=tuple(
                CutPoint(**entry | {"crossing": tuple(_tensor(tensor) for tensor in entry["crossing"])})
                for entry in document["cuts"]
            ),
            cumulative_bytes={precision: tuple(sizes) for precision, sizes in document["cumulative_bytes"].items()},
            peak_bytes={
                precision: {runtime: tuple(peaks) for runtime, peaks in by_runtime.items()}
                for precision, by_runtime in document["peak_bytes"].items()
            },
        )


def _tensor(entry: dict[str, object]) -> TensorInfo:
    return TensorInfo(**entry | {"shape": tuple(entry["shape"])})  # type: ignore[arg-type]
