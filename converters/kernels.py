"""What a runtime runs: kernels and the tensors between them, as TensorFlow Lite's converter makes them of a graph.

They say what memory depends on and nothing else. :mod:`converters.lowering` foresees them without converting;
:mod:`converters.peak` adds up what they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from converters.cuts import crossing_positions
from converters.graph import Graph


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Constant weights of a kernel, for ``channels`` output channels (all groups together).

    ``depth`` is how many input channels one output channel takes, ``taps`` the positions of the filter's window.
    """

    channels: int
    depth: int
    taps: int = 1
    groups: int = 1

    @property
    def count(self) -> int:
        return self.channels * self.depth * self.taps


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a filter or pool sees at once, and how far it moves: (height, width)."""

    size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)

    @property
    def taps(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def moves(self) -> bool:
        """Whether an output is more than one input position, or some positions are left out."""
        return self.taps > 1 or self.stride != (1, 1)


# Each is itself, which makes looking up what is known of one quick.
@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """One kernel, brought in by operation ``k``; a head that ends at or after operation ``absorbed_by`` lacks it.

    ``inputs`` and ``outputs`` are positions among the tensors; constants are not. ``rows`` is how many times the
    weights are applied, for a filter ``output_size`` (height, width). ``constants`` is how many numbers it has besides
    weights that do not change.
    """

    k: int
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: Weights | None = None
    window: Window | None = None
    output_size: tuple[int, int] = (1, 1)
    rows: int = 1
    constants: int = 0
    absorbed_by: int | None = None


@dataclass(frozen=True, kw_only=True)
class HeadKernels:
    """The kernels of one head in the order they run, and the tensors that it takes and returns.

    ``sizes_bytes`` are those of all tensors of the model, one sample each.
    """

    kernels: tuple[Kernel, ...]
    sizes_bytes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @cached_property
    def lives(self) -> dict[int, tuple[int, int]]:
        """When each tensor is alive that the head neither takes nor returns: from which kernel to which, by number."""
        found: dict[int, tuple[int, int]] = {}
        for step, kernel in enumerate(self.kernels):
            for tensor in kernel.outputs:
                found[tensor] = (step, step)
            for tensor in kernel.inputs:
                found[tensor] = (found[tensor][0] if tensor in found else step, step)
        for tensor in (*self.inputs, *self.outputs):
            found.pop(tensor, None)
        return found


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A whole model as kernels. ``places`` tells where each tensor of the graph is among the kernels' tensors."""

    graph: Graph
    sizes_bytes: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    places: tuple[int, ...]

    def head(self, k: int) -> HeadKernels:
        """The head that ends after operation ``k``, 1 to n."""
        graph = self.graph
        born = graph.born()
        returned = (*crossing_positions(graph, k), *(place for place in graph.outputs if born[place] <= k))
        return HeadKernels(
            kernels=tuple(
                kernel
                for kernel in self.kernels
                if kernel.k <= k and (kernel.absorbed_by is None or kernel.absorbed_by > k)
            ),
            sizes_bytes=self.sizes_bytes,
            inputs=tuple(self.places[position] for position in graph.inputs),
            outputs=tuple(dict.fromkeys(self.places[position] for position in returned)),
        )
