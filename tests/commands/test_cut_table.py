"""The table of cuts and the names of cuts, on an outline made by hand."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cloud_server.allocation.settings import MemoryModelName
from cloud_server.cli.cut_plot import terminal_plot, write_plot
from cloud_server.cli.cuts import cuts_table
from cloud_server.cut_lookup import find_cut
from cloud_server.cut_report import Budget, CutReport, cut_report
from converters import Outline
from converters.graph import Graph, Operation, TensorInfo
from edge_sdk.errors import ConfigError, IllegalCutError

SIZES = (40, 60, 20, 10)


def chain(sizes: tuple[int, ...] = SIZES) -> Outline:
    """Operations in a row, each with 100 parameters; the second takes the raw input once more."""
    names = [f"layer_{k}" for k in range(1, len(sizes) + 1)]
    tensors = [TensorInfo(name="image", source="image", shape=(8,), dtype="float32")]
    tensors += [
        TensorInfo(name=name, source=name, shape=(size,), dtype="float32")
        for name, size in zip(names, sizes, strict=True)
    ]
    graph = Graph(
        name="chain",
        tensors=tuple(tensors),
        inputs=(0,),
        operations=tuple(
            Operation(
                name=name,
                kind="Dense",
                layer=number,
                parameters=100,
                inputs=(number, 0) if number == 1 else (number,),
                outputs=(number + 1,),
            )
            for number, name in enumerate(names)
        ),
        outputs=(len(sizes),),
        output_names=("out",),
    )
    return Outline.of(graph, "ab" * 32)


def report(budget_bytes: int | None) -> CutReport:
    budget = None if budget_bytes is None else Budget(budget_bytes=budget_bytes)
    return cut_report("chain", chain(), "cumulative", budget)


def test_figures_of_a_cut() -> None:
    (first, second, third), whole = report(None).rows, report(None).whole
    assert (first.legal, second.legal, third.legal) == (False, True, True)
    assert "raw input 'image'" in first.reason
    assert (second.feature_bytes_float, second.feature_bytes_int8) == (240, 60)
    assert [row.head_parameters for row in (first, second, third, whole)] == [100, 200, 300, 400]
    assert [row.cumulative_bytes for row in (first, second, third, whole)] == [140, 300, 420, 530]
    assert [row.fits for row in (first, second, third)] == [None, None, None]


@pytest.mark.parametrize(
    ("budget_bytes", "chosen", "deepest"), [(100, None, None), (299, None, None), (300, 2, 2), (500, 3, 3), (530, 4, 3)]
)
def test_the_budget_decides_what_is_marked(budget_bytes: int, chosen: int | None, deepest: int | None) -> None:
    found = report(budget_bytes)
    assert (found.chosen, found.deepest, found.smallest) == (chosen, deepest, 3)
    assert bool(found.refusal) == (chosen is None)


PEAKS = {"litert": (1000, 1500, 1400, 2000), "tflite-runtime": (900, 950, 990, 995)}
FLOAT_PEAKS = {"litert": (3000, 4500, 4200, 6000), "tflite-runtime": (2700, 2850, 2970, 2985)}
BY_PRECISION = {"int8": PEAKS, "int8-weights": FLOAT_PEAKS, "float16": FLOAT_PEAKS, "float32": FLOAT_PEAKS}


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (Budget(budget_bytes=1399), None),
        (Budget(budget_bytes=1400), 3),
        (Budget(budget_bytes=1999), 3),
        (Budget(budget_bytes=2000), 4),
        (Budget(budget_bytes=989, runtime="tflite-runtime"), 2),
    ],
)
def test_the_peak_of_the_device_s_runtime_decides(budget: Budget, chosen: int | None) -> None:
    outline = dataclasses.replace(chain(), peak_bytes=BY_PRECISION)
    found = cut_report("chain", outline, "peak", budget)
    assert found.chosen == chosen
    document = found.to_document(illegal=True)
    assert document["cuts"][0]["peak_bytes"] == {"litert": 1000, "tflite_runtime": 900}
    assert (document["runtime"], document["memory_model"]) == (budget.runtime, "peak")
    assert [cut["fits"] for cut in document["cuts"]] == [
        peak <= budget.budget_bytes for peak in PEAKS[budget.runtime][:3]
    ]
    assert found.refusal == (
        ""
        if chosen
        else "its smallest int8 head, cut after operation 3 ('layer_3'), is predicted to grow a process with litert by "
        "1.4 kB, the budget is 1.4 kB; give it at least 1.4 kB, or take a smaller model"
    )
    assert f"predicted peak, {budget.runtime}" in terminal_plot(found)


@pytest.mark.parametrize(("memory_model", "chosen"), [("peak", 3), ("cumulative", 4)])
def test_heads_of_another_precision_need_more(memory_model: MemoryModelName, chosen: int) -> None:
    outline = dataclasses.replace(chain(), peak_bytes=BY_PRECISION)
    found = cut_report("chain", outline, memory_model, Budget(budget_bytes=5000), "float32")
    assert found.chosen == chosen
    document = found.to_document(illegal=True)
    assert document["precision"] == "float32"
    assert [cut["peak_bytes"]["litert"] for cut in document["cuts"]] == [3000, 4500, 4200]
    assert [cut["cumulative_bytes"] for cut in document["cuts"]] == [560, 1200, 1680]
    assert document["cuts"][0]["feature_bytes_int8"] == report(None).rows[0].feature_bytes_int8


def test_a_budget_for_a_runtime_without_predictions_is_told() -> None:
    with pytest.raises(ConfigError, match="no prediction of memory for the runtime 'litert'"):
        cut_report("chain", chain(), "peak", Budget(budget_bytes=1))


def test_marks_are_words() -> None:
    found = report(500)
    assert found.marks(found.rows[2]) == ("chosen", "smallest feature", "deepest that fits")
    assert found.marks(found.rows[1]) == ()


def test_the_document_lists_illegal_cuts_on_request() -> None:
    found = report(300)
    assert [cut["k"] for cut in found.to_document(illegal=False)["cuts"]] == [2, 3]
    document = found.to_document(illegal=True)
    assert [(cut["k"], cut["legal"]) for cut in document["cuts"]] == [(1, False), (2, True), (3, True)]
    assert document["cuts"][1]["tensors"] == [
        {"name": "layer_2", "source": "layer_2", "shape": [60], "dtype": "float32"}
    ]


def test_cuts_are_found_by_number_and_by_name() -> None:
    assert [find_cut("chain", chain(), wanted) for wanted in ("2", "layer_3", "4", "layer_4")] == [2, 3, 4, 4]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("0", r"expected a cut from 1 to 3 \(or 4 for the whole model\), got 0; .*2 \('layer_2'\)"),
        ("9", "got 9; the nearest legal cuts are 2"),
        ("-1", "got -1"),
        ("9" * 5000, "got 9{60}…; the nearest legal cuts are 2"),
        ("z" * 5000, "has no operation 'z{60}…' to cut after"),
        ("1", r"cannot be cut after operation 1 \('layer_1'\): it would send the raw input .*nearest legal cuts are 2"),
        ("layer_1", "cannot be cut after operation 1"),
        ("layr_3", r"has no operation 'layr_3' to cut after; did you mean 'layer_3' \(k=3\)"),
        ("zzz", "the nearest legal cuts are"),
    ],
)
def test_a_cut_that_is_none_is_told_with_what_is_near(wanted: str, told: str) -> None:
    with pytest.raises(IllegalCutError, match=told):
        find_cut("chain", chain(), wanted)


def test_a_number_that_is_a_name_too_is_told() -> None:
    outline = chain()
    operations = [dataclasses.replace(each, name="2" if each.k == 3 else each.name) for each in outline.operations]
    outline = dataclasses.replace(outline, operations=tuple(operations))
    with pytest.raises(IllegalCutError, match=r"'2' may mean the cut after operation 2 \('layer_2'\) or 3 \('2'\)"):
        find_cut("chain", outline, "2")
    assert [find_cut("chain", outline, wanted) for wanted in ("layer_2", "3")] == [2, 3]


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_its_width(width: int) -> None:
    outline = dataclasses.replace(chain(), peak_bytes=BY_PRECISION)
    found = cut_report("chain", outline, "peak", Budget(budget_bytes=1400))
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(cuts_table(found, illegal=True, width=width))
    text = console.export_text()
    for part in ("layer_2", "60 B", "240 B", "300 B", "1.5 kB", "950 B", "chosen", "illegal:"):
        assert part in text
    words = " ".join(text.split())
    assert ("60 B 240 B 200 300 B 1.5 kB 950 B no" in words) == (width == 200)


@pytest.mark.parametrize("count", [2, 3, 71, 72, 73, 430])
def test_the_plot_fits_a_terminal(count: int) -> None:
    outline = chain(tuple(range(1, count + 1)))
    found = cut_report("chain", outline, "cumulative", Budget(budget_bytes=100 * count // 2))
    plot = terminal_plot(found)
    assert all(len(line) <= 86 for line in plot.splitlines())
    legal = len(found.legal)
    assert (f"k=2 to {count - 1}" in plot) == bool(legal)
    if legal:
        assert "█" in plot
    if legal and found.chosen is not None:
        assert f"▲ k={found.chosen}" in plot


def test_a_picture_without_matplotlib_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        write_plot(report(300), tmp_path / "cuts.png")
    assert not list(tmp_path.iterdir())


def test_a_picture_is_written_as_its_suffix_says(tmp_path: Path) -> None:
    write_plot(report(300), tmp_path / "cuts.png")
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_plot(report(300), tmp_path / "cuts.nonsense")
