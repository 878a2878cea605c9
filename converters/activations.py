"""What the activations of a head take, in a runtime that leaves some of its kernels to a delegate.

Kernels in a row that the delegate runs are one partition. What only they know lies in the delegate's workspace, which
partitions use one after the other; all else in the runtime's arena, where what a partition takes or makes is alive as
long as it runs. What the head takes and returns is there all the time and lies beside the rest; the copies of the
outputs that the caller gets are counted too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from converters.arena import Use, align, arena_bytes
from converters.kernel_builder import FLOAT_BYTES
from converters.kernels import HeadKernels, Kernel

# They may write their output over an input.
_BINARY = ("add", "sub", "mul", "maximum", "squared_difference", "prelu")
_UNARY = ("relu", "relu6", "clipped_relu", "leaky_relu", "sigmoid", "hard_swish", "softmax", "reshape")
_ELEMENTWISE = frozenset((*_BINARY, *_UNARY))


@dataclass(frozen=True, kw_only=True)
class Activations:
    """How a runtime places them.

    ``delegated`` tells whether the delegate runs a kernel, ``workspace_bytes`` plans a partition's workspace,
    ``scratch_bytes`` is what the runtime's own kernel needs while it runs. ``in_place``: the delegate writes the output
    of an elementwise kernel over its input, where nothing else takes that and only one kernel takes the output.
    ``rounds_input``: whether it first rounds a kernel's float input to int8, and can then do without it.
    """

    delegated: Callable[[Kernel], bool]
    workspace_bytes: Callable[[Sequence[Use]], int]
    scratch_bytes: Callable[[Kernel, HeadKernels], int] = lambda kernel, head: 0  # noqa: ARG005
    in_place: bool = False
    rounds_input: Callable[[Kernel], bool] = lambda kernel: False  # noqa: ARG005

    def bytes_of(self, head: HeadKernels) -> int:
        """What the activations of ``head`` take."""
        sizes = head.sizes_bytes
        delegated = [self.delegated(kernel) for kernel in head.kernels]
        lives = _written_over(head, delegated) if self.in_place else head.lives
        first_of, last_of = _partitions(delegated)
        rounds = [self.rounds_input(kernel) for kernel in head.kernels]
        arena: list[Use] = []
        workspaces: dict[int, list[Use]] = {}
        # Two moments for each kernel: in the first it rounds its input.
        for tensor, (begin, end) in lives.items():
            if delegated[begin] and first_of[begin] == first_of[end]:
                until = 2 * end + (not (rounds[end] and tensor == head.kernels[end].inputs[0]))
                use = Use(align(sizes[tensor]), 2 * begin + rounds[begin], until)
                workspaces.setdefault(first_of[begin], []).append(use)
            else:
                arena.append(Use(align(sizes[tensor]), 2 * first_of[begin], 2 * last_of[end] + 1))
        for step, kernel in enumerate(head.kernels):
            if rounds[step]:
                rounded = Use(align(sizes[kernel.inputs[0]] // FLOAT_BYTES), 2 * step, 2 * step + 1)
                workspaces.setdefault(first_of[step], []).append(rounded)
            if not delegated[step] and (scratch := self.scratch_bytes(kernel, head)):
                arena.append(Use(align(scratch), 2 * step, 2 * step + 1))
        ends = {*head.inputs, *head.outputs}
        ends_bytes = sum(align(sizes[tensor]) for tensor in (*ends, *head.outputs))
        return ends_bytes + arena_bytes(arena) + max(map(self.workspace_bytes, workspaces.values()), default=0)


def _partitions(delegated: Sequence[bool]) -> tuple[list[int], list[int]]:
    """For each kernel the first and the last of its partition; one that is not delegated is by itself."""
    first = list(range(len(delegated)))
    last = first.copy()
    for step in range(1, len(delegated)):
        if delegated[step] and delegated[step - 1]:
            first[step] = first[step - 1]
    for step in range(len(delegated) - 2, -1, -1):
        if first[step] == first[step + 1]:
            last[step] = last[step + 1]
    return first, last


def _written_over(head: HeadKernels, delegated: Sequence[bool]) -> dict[int, tuple[int, int]]:
    """When tensors are alive; one that is written over another one lives on in that."""
    takers = Counter(tensor for kernel in head.kernels for tensor in kernel.inputs)
    lives = dict(head.lives)
    roots: dict[int, int] = {}
    for kernel, own in zip(head.kernels, delegated, strict=True):
        made = kernel.outputs[0]
        if not own or kernel.kind not in _ELEMENTWISE or takers[made] != 1 or made not in lives:
            continue
        for tensor in kernel.inputs:
            same = head.sizes_bytes[tensor] == head.sizes_bytes[made]
            if same and takers[tensor] == 1 and tensor in head.lives:
                root = roots[made] = roots.get(tensor, tensor)
                lives[root] = (lives[root][0], lives.pop(made)[1])
                break
    return lives
