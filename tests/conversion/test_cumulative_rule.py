"""The cumulative rule: examples from its definition, and what holds for any sizes and any legal cuts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters import Choice, choose_cumulative
from converters.graph import Graph, Operation, TensorInfo
from converters.memory import cumulative_cut, operation_memory
from converters.outline import Outline
from edge_sdk.errors import InvalidInputError

MB = 10**6


def cut(sizes, legal, budget):
    return cumulative_cut(list(itertools.accumulate(sizes)), {*legal, len(sizes)}, budget)


def test_two_four_and_six_mb_against_eight_are_cut_after_the_second():
    assert cut([2 * MB, 4 * MB, 6 * MB], {1, 2}, 8 * MB) == 2


@pytest.mark.parametrize(
    ("sizes", "legal", "budget", "k"),
    [
        ([2, 4, 6], {1, 2}, 1, None),  # not even the first layer fits
        ([2, 4, 6], {1, 2}, 2, 1),  # a budget that is just met is not exceeded
        ([2, 4, 6], {1, 2}, 11, 2),
        ([2, 4, 6], {1, 2}, 12, 3),  # everything fits
        ([2, 4, 6], {1}, 8, 1),  # moved back to the nearest legal one
        ([2, 4, 6], set(), 8, None),  # two layers fit, but there is no legal cut before the third
        ([2, 4, 6], {2}, 5, None),  # one layer fits, the only legal cut is behind the second
        ([2, 4, 6], set(), 12, 3),  # the whole model needs no cut
        ([0, 0, 6], {1, 2}, 0, 2),  # layers without weights or size
        ([6], set(), 5, None),
        ([6], set(), 6, 1),
    ],
)
def test_examples(sizes, legal, budget, k):
    assert cut(sizes, legal, budget) == k


def test_what_fits_but_cannot_run_on_a_device_as_a_whole_is_cut():
    assert cumulative_cut([2, 6, 12], {1, 2}, 12) == 2
    assert cumulative_cut([2, 6, 12], set(), 12) is None


@given(
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=20),
    flags=st.lists(st.booleans(), min_size=20, max_size=20),
    budget=st.integers(0, 1000),
)
def test_the_cut_is_the_deepest_legal_one_that_fits(sizes, flags, budget):
    n = len(sizes)
    legal = {k for k in range(1, n) if flags[k]}
    k = cut(sizes, legal, budget)
    fits = [place for place in range(1, n + 1) if sum(sizes[:place]) <= budget]
    if k is None:
        assert not [place for place in fits if place in legal or place == n]
    elif k == n:
        assert sum(sizes) <= budget
    else:
        assert k in legal
        assert sum(sizes) > budget
        assert k == max(place for place in fits if place in legal)


@given(
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=20),
    budgets=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
)
def test_a_larger_budget_never_cuts_earlier(sizes, budgets):
    legal = set(range(1, len(sizes)))
    small, large = sorted(budgets)
    assert (cut(sizes, legal, small) or 0) <= (cut(sizes, legal, large) or 0)


def model(*layers):
    """A chain of (layer number, parameters, output shape)."""
    tensors = [TensorInfo(name="image", source="image", shape=(1,), dtype="float32")]
    operations = []
    for number, (layer, parameters, shape, dtype) in enumerate(layers):
        tensors.append(TensorInfo(name=f"t{number}", source=f"op{number}", shape=shape, dtype=dtype))
        operations.append(
            Operation(
                name=f"op{number}", kind="Any", layer=layer, parameters=parameters, inputs=(number,),
                outputs=(number + 1,),
            )
        )  # fmt: skip
    return Graph(
        name="model",
        tensors=tuple(tensors),
        inputs=(0,),
        operations=tuple(operations),
        outputs=(len(layers),),
        output_names=("out",),
    )


def test_a_size_is_parameters_and_output_at_one_byte_each():
    table = operation_memory(
        model((0, 100, (4, 4, 2), "float32"), (1, 0, (32,), "float32"), (2, 330, (10,), "float32"))
    )
    assert [(row.parameters, row.output_bytes, row.size_bytes, row.cumulative_bytes) for row in table] == [
        (100, 32, 132, 132),
        (0, 32, 32, 164),
        (330, 10, 340, 504),
    ]
    assert [row.k for row in table] == [1, 2, 3]


def test_integers_keep_their_size():
    assert operation_memory(model((0, 0, (5,), "int32")))[0].output_bytes == 20


def test_a_shared_layer_counts_once_where_it_is_called_first():
    table = operation_memory(model((0, 100, (10,), "float32"), (1, 5, (10,), "float32"), (0, 100, (10,), "float32")))
    assert [row.size_bytes for row in table] == [110, 15, 0]
    assert table[2].output_bytes == 10
    assert table[2].cumulative_bytes == 125


def test_the_choice_tells_the_size_of_what_runs_on_the_device():
    outline = Outline.of(model((0, 100, (10,), "float32"), (1, 100, (10,), "float32")), "0" * 64)
    assert choose_cumulative(outline, 109) == Choice(k=None, cumulative_bytes=0)
    assert choose_cumulative(outline, 219) == Choice(k=1, cumulative_bytes=110)
    assert choose_cumulative(outline, 220) == Choice(k=2, cumulative_bytes=220)


def test_a_negative_budget_is_refused():
    with pytest.raises(InvalidInputError, match="got -1"):
        choose_cumulative(Outline.of(model((0, 1, (1,), "float32")), "0" * 64), -1)
