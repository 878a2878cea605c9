"""The outline of a model: what is known of it without Keras, to choose a cut by. It is cached as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from converters.cuts import CutPoint, cut_points
from converters.graph import Graph, TensorInfo
from converters.memory import OperationMemory, operation_memory


@dataclass(frozen=True, kw_only=True)
class Outline:
    """``model_sha256`` covers architecture and weights; ``n`` is the number of operations.

    ``inputs`` and ``outputs`` are the model's, in its order, outputs by the names that the user knows.
    ``edge_only_reason`` says why no device can run the whole model, and is empty where one can. ``operations`` are 1 to
    n, ``cuts`` 1 to n - 1.
    """

    model_sha256: str
    n: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    edge_only_reason: str
    operations: tuple[OperationMemory, ...]
    cuts: tuple[CutPoint, ...]

    @classmethod
    def of(cls, graph: Graph, model_sha256: str) -> Outline:
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
        )


def _tensor(entry: dict[str, object]) -> TensorInfo:
    return TensorInfo(**entry | {"shape": tuple(entry["shape"])})  # type: ignore[arg-type]
