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

    ``operations`` are 1 to n, ``cuts`` 1 to n - 1.
    """

    model_sha256: str
    n: int
    operations: tuple[OperationMemory, ...]
    cuts: tuple[CutPoint, ...]

    @classmethod
    def of(cls, graph: Graph, model_sha256: str) -> Outline:
        """The outline of a graph."""
        return cls(model_sha256=model_sha256, n=graph.n, operations=operation_memory(graph), cuts=cut_points(graph))

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
            operations=tuple(OperationMemory(**entry) for entry in document["operations"]),
            cuts=tuple(
                CutPoint(**entry | {"crossing": tuple(_tensor(tensor) for tensor in entry["crossing"])})
                for entry in document["cuts"]
            ),
        )


def _tensor(entry: dict[str, object]) -> TensorInfo:
    return TensorInfo(**entry | {"shape": tuple(entry["shape"])})  # type: ignore[arg-type]
