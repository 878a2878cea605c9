"""From an outline and a budget to a cut, or to the reason why there is none."""

from __future__ import annotations

import dataclasses

import pytest

from cloud_server.allocation.memory_model import MODELS, Choice, ChosenCut, NoCut, choose, runtime_of
from cloud_server.allocation.settings import MEMORY_MODELS
from converters.cuts import CutPoint
from converters.memory import OperationMemory
from converters.outline import Outline
from converters.precision import PRECISIONS
from edge_sdk.protocol import Resources

SIZES = (2_000_000, 4_000_000, 6_000_000)


def outline(*, legal: tuple[int, ...] = (1, 2)) -> Outline:
    cumulative = [sum(SIZES[: k + 1]) for k in range(len(SIZES))]
    return Outline(
        model_sha256="0" * 64,
        n=len(SIZES),
        inputs=(),
        outputs=(),
        edge_only_reason="",
        operations=tuple(
            OperationMemory(
                k=k,
                name=f"layer_{k}",
                kind="Dense",
                parameters=SIZES[k - 1],
                output_bytes=0,
                size_bytes=SIZES[k - 1],
                cumulative_bytes=cumulative[k - 1],
            )
            for k in range(1, len(SIZES) + 1)
        ),
        cuts=tuple(
            CutPoint(
                k=k,
                name=f"layer_{k}",
                legal=k in legal,
                reason="" if k in legal else "no",
                crossing=(),
                feature_bytes=1,
            )
            for k in (1, 2)
        ),
        # Memory need not grow with the cut: what is returned is no longer shared.
        peak_bytes={
            "int8": {
                "litert": (5_000_000, 7_000_000, 6_000_000),
                "tflite-runtime": (3_000_000, 4_000_000, 4_500_000),
            },
            **{precision: {"litert": (8_000_000, 9_000_000, 10_000_000)} for precision in PRECISIONS[1:]},
        },
        cumulative_bytes={
            precision: tuple(factor * size for size in cumulative)
            for precision, factor in zip(PRECISIONS, (1, 1, 2, 4), strict=True)
        },
    )


def test_every_memory_model_that_can_be_named_is_there() -> None:
    assert set(MODELS) == set(MEMORY_MODELS)


@pytest.mark.parametrize(
    ("budget", "legal", "k", "predicted"),
    [
        (8_000_000, (1, 2), 2, 6_000_000),
        (8_000_000, (1,), 1, 2_000_000),
        (6_000_000, (1, 2), 2, 6_000_000),
        (12_000_000, (1, 2), 3, 12_000_000),
        (12_000_000, (), 3, 12_000_000),
    ],
)
def test_cumulative_chooses_the_cut_of_the_classic_rule(
    budget: int, legal: tuple[int, ...], k: int, predicted: int
) -> None:
    assert MODELS["cumulative"](outline(legal=legal), budget, "litert", "int8") == ChosenCut(
        k=k, n=3, cut=f"layer_{k}", predicted_bytes=predicted, whole_bytes=12_000_000
    )


@pytest.mark.parametrize(
    ("budget", "legal", "where", "needs"),
    [
        (1_000_000, (1, 2), "cut after operation 1 ('layer_1')", "2 MB"),
        (5_000_000, (2,), "cut after operation 2 ('layer_2')", "6 MB"),
        (5_000_000, (), "all 3 operations", "12 MB"),
    ],
)
def test_what_does_not_fit_says_what_it_would_need(budget: int, legal: tuple[int, ...], where: str, needs: str) -> None:
    chosen = MODELS["cumulative"](outline(legal=legal), budget, "litert", "int8")
    assert isinstance(chosen, NoCut)
    assert chosen.reason.startswith(
        f"its smallest int8 head, {where}, needs by the cumulative rule {needs}, the budget"
    )
    assert chosen.advice == f"give it at least {needs}, or take a smaller model"


@pytest.mark.parametrize(
    ("runtime", "budget", "legal", "k", "predicted"),
    [
        ("litert", 5_500_000, (1, 2), 1, 5_000_000),
        ("litert", 6_000_000, (1, 2), 3, 6_000_000),
        ("tflite-runtime", 4_000_000, (1, 2), 2, 4_000_000),
        ("tflite-runtime", 4_000_000, (1,), 1, 3_000_000),
    ],
)
def test_peak_chooses_the_deepest_cut_that_fits_with_the_runtime(
    runtime: str, budget: int, legal: tuple[int, ...], k: int, predicted: int
) -> None:
    whole = {"litert": 6_000_000, "tflite-runtime": 4_500_000}[runtime]
    assert MODELS["peak"](outline(legal=legal), budget, runtime, "int8") == ChosenCut(
        k=k, n=3, cut=f"layer_{k}", predicted_bytes=predicted, whole_bytes=whole
    )


def test_peak_names_the_smallest_head() -> None:
    chosen = MODELS["peak"](outline(legal=(2,)), 3_500_000, "tflite-runtime", "int8")
    assert isinstance(chosen, NoCut)
    assert chosen.reason == (
        "its smallest int8 head, cut after operation 2 ('layer_2'), is predicted to grow a process with tflite-runtime "
        "by 4 MB, the budget is 3.5 MB"
    )


def test_a_need_is_told_so_that_it_suffices() -> None:
    model = dataclasses.replace(outline(), peak_bytes={"int8": {"litert": (5_004_001, 7_000_000, 6_000_000)}})
    chosen = MODELS["peak"](model, 1, "litert", "int8")
    assert isinstance(chosen, NoCut)
    assert chosen.advice == "give it at least 5.01 MB, or take a smaller model"
    assert isinstance(MODELS["peak"](model, 5_010_000, "litert", "int8"), ChosenCut)


def test_where_nothing_can_run_there_is_no_need_to_tell() -> None:
    nothing = dataclasses.replace(outline(legal=()), edge_only_reason="no")
    chosen = MODELS["peak"](nothing, 10**9, "litert", "int8")
    assert isinstance(chosen, NoCut)
    assert (chosen.needed_bytes, chosen.advice) == (None, "take another model")


class TestPrecisions:
    def test_each_has_its_own_cut(self) -> None:
        choice = choose(MODELS["cumulative"], outline(), 8_000_000, "litert")
        assert isinstance(choice, Choice)
        assert choice.ladder.cuts == (("int8", 2), ("int8-weights", 2), ("float16", 1), ("float32", 1))
        assert choice.first == choice.at("int8")
        assert (choice.at("float16").predicted_bytes, choice.at("float16").whole_bytes) == (4_000_000, 24_000_000)

    def test_one_that_fits_nowhere_says_why(self) -> None:
        choice = choose(MODELS["peak"], outline(), 6_000_000, "litert", max_error=0.3)
        assert isinstance(choice, Choice)
        assert choice.ladder.cuts[0] == ("int8", 3)
        assert all(isinstance(cut, str) and "by 8 MB, the budget is 6 MB" in cut for _, cut in choice.ladder.cuts[1:])
        assert choice.ladder.max_error == 0.3

    def test_one_that_is_asked_for_is_the_only_one(self) -> None:
        choice = choose(MODELS["cumulative"], outline(), 8_000_000, "litert", precision="float32")
        assert isinstance(choice, Choice)
        assert choice.ladder.cuts == (("float32", 1),)
        assert choice.first.predicted_bytes == 8_000_000

    def test_where_none_fits_the_first_tells(self) -> None:
        chosen = choose(MODELS["cumulative"], outline(), 1_000_000, "litert")
        assert isinstance(chosen, NoCut)
        assert "smallest int8 head" in chosen.reason


@pytest.mark.parametrize(
    ("runtimes", "expected"),
    [
        ({"litert": "2", "tflite-runtime": "2.14"}, "litert"),
        ({"tflite-runtime": "2.14", "litert": "2"}, "tflite-runtime"),
        ({"strange": "1", "tflite-runtime": "2.14"}, "tflite-runtime"),
        ({}, "litert"),
    ],
)
def test_a_device_runs_heads_with_the_first_runtime_that_it_names(runtimes: dict[str, str], expected: str) -> None:
    resources = Resources(ram_bytes=1, ram_available_bytes=1, cores=1, architecture="x86_64", runtimes=runtimes)
    assert runtime_of(resources) == expected
