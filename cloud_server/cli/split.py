"""`splitfleet split`: one model, one cut, one bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.allocation_options import registry_options
from cloud_server.cli.model_options import PRECISIONS, LoadingChoice, budget_options, find_source, model_options
from cloud_server.cli.output import json_option
from edge_sdk.errors import ConfigError, DoesNotFitError
from edge_sdk.sizes import format_size

if TYPE_CHECKING:
    from cloud_server.allocation.settings import MemoryModelName
    from cloud_server.cut_report import Budget
    from cloud_server.models import CalibrationData, ModelSource
    from converters import Outline, Precision
    from converters.precision import Ladder
    from edge_sdk.bundle import Bundle

RANDOM = "random"


@click.command()
@model_options
@click.option("--cut", "wanted", metavar="NAME_OR_K", help="Cut after this operation, by name or by its number k.")
@budget_options
@click.option(
    "--calibration",
    metavar="FILE|random",
    help="Real samples as .npz, an array (N, …) for each input; 'random' goes without. A model of a task has its own.",
)
@click.option(
    "--precision",
    type=click.Choice(("auto", *PRECISIONS)),
    default="auto",
    show_default=True,
    help="Of the head; 'auto' takes the first of int8, int8-weights, float16 and float32 that is accurate enough.",
)
@click.option(
    "--max-error",
    type=click.FloatRange(min=0.0, min_open=True),
    help="What 'auto' accepts of a head: noise in proportion to the signal, of the features and of the outputs that "
    "the tail makes of them.  [default: 0.1]",
)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the bundle goes; a folder that is not there yet, or empty.",
)
@registry_options
@json_option
def split(
    model: str,
    loading: LoadingChoice,
    wanted: str | None,
    budget: Budget | None,
    memory_model: MemoryModelName,
    calibration: str | None,
    precision: Precision,
    max_error: float | None,
    out: Path,
    home: Path | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Cut MODEL into a bundle: the head for a device, the tail for a server.

    MODEL is a .keras file, a legacy .h5 or .hdf5 file, zoo:NAME or registry:NAME. The cut is the one that --cut names,
    or the one that the memory model picks for --profile or --ram.
    """
    from cloud_server.bundle_copy import check_free, copy_bundle
    from cloud_server.cli.output import print_json, stderr
    from cloud_server.cli.waiting import waiting
    from cloud_server.home import Home
    from converters import Workshop

    if (wanted is None) == (budget is None):
        raise click.UsageError("name the cut with --cut, or the memory with --profile or --ram; one of them")
    if max_error is not None and precision != "auto":
        raise click.UsageError("--max-error is for --precision auto: any other precision is taken as it is")
    check_free(out)
    source = find_source(model, loading, home=home, registry=registry)
    _check_calibration(source, calibration)
    with Workshop(Home.at(home).conversions, workers=1) as workshop:
        with waiting(f"reading {model}"):
            outline = workshop.outline(source.recipe(source.calibration)).result()
        samples = _calibration(source, calibration, outline)
        recipe = source.recipe(samples)
        ladder = _ladder(model, outline, wanted, budget, memory_model, precision, max_error)
        with waiting(f"building the bundle: {model} cut after operation {ladder.first_k} of {outline.n}"):
            folder = workshop.build_first(recipe, ladder).result()
    bundle = copy_bundle(folder, out)
    document = _document(bundle, out, "random" if samples is None else calibration or "task")
    if samples is None:
        stderr().print("warning: calibrated with random samples: measure the accuracy before you trust it")
    if bundle.manifest.precision_reason:
        stderr().print(f"the head is {bundle.manifest.precision}: {bundle.manifest.precision_reason}", soft_wrap=True)
    if bundle.manifest.tail_tflite_reason:
        stderr().print(
            f"only the engine 'tensorflow' can serve the tail, there is no tail.tflite: "
            f"{bundle.manifest.tail_tflite_reason}",
            soft_wrap=True,
        )
    if as_json:
        print_json(document)
    else:
        _show(document)


def _check_calibration(source: ModelSource, wanted: str | None) -> None:
    """Before anything takes long."""
    from edge_sdk.bundle import open_regular

    if wanted is None and source.calibration is None:
        raise ConfigError(
            "without calibration data the accuracy is at risk: an int8 head then guesses the range of each tensor; "
            "give real samples with --calibration data.npz, or go on without them with --calibration random"
        )
    if wanted in (None, RANDOM):
        return
    try:
        open_regular(Path(wanted)).close()
    except OSError as error:
        raise ConfigError(f"--calibration {wanted}: cannot be read ({error.strerror})") from None


def _calibration(source: ModelSource, wanted: str | None, outline: Outline) -> CalibrationData | None:
    """``None`` stands for random samples, which a user must ask for."""
    from cloud_server.models import CalibrationData

    if wanted is None:
        return source.calibration
    return None if wanted == RANDOM else CalibrationData.of_file_for(Path(wanted), outline.inputs)


def _ladder(
    model: str,
    outline: Outline,
    wanted: str | None,
    budget: Budget | None,
    memory_model: MemoryModelName,
    precision: Precision,
    max_error: float | None,
) -> Ladder:
    """The precisions to try, each with its cut: that which is ``wanted``, else that which the budget allows it."""
    from cloud_server.allocation.memory_model import MODELS, NoCut, choose
    from cloud_server.cut_lookup import find_cut
    from converters.precision import Ladder

    if budget is None:
        k = find_cut(model, outline, wanted or "")
        return Ladder.of(precision, max_error, lambda _: k)
    rule, size_bytes, runtime = MODELS[memory_model], budget.budget_bytes, budget.runtime
    choice = choose(rule, outline, size_bytes, runtime, precision=precision, max_error=max_error)
    if isinstance(choice, NoCut):
        raise DoesNotFitError(f"model {model!r} never fits: {choice.reason}; {choice.advice}")
    return choice.ladder


def _document(bundle: Bundle, out: Path, calibration: str) -> dict[str, Any]:
    manifest = bundle.manifest
    head_bytes = sum(entry.size_bytes for entry in manifest.head_files)
    return {
        "bundle": str(out),
        "digest": bundle.digest,
        "task": manifest.task,
        "model": manifest.model.name,
        "model_sha256": manifest.model.sha256,
        "cut": {"k": manifest.cut.k, "n": manifest.cut.n, "name": manifest.cut.name},
        "precision": manifest.precision,
        "precision_reason": manifest.precision_reason,
        "calibration": calibration,
        "tensors": [
            {"name": spec.name, "source": spec.source, "shape": list(spec.shape), "dtype": spec.dtype}
            for spec in manifest.crossing
        ],
        "feature_bytes": manifest.feature_bytes,
        "head_bytes": head_bytes,
        "tail_bytes": sum(entry.size_bytes for entry in manifest.files) - head_bytes,
        "tail_tflite": manifest.has_tail_tflite,
        "tail_tflite_reason": manifest.tail_tflite_reason,
        "cumulative_bytes": manifest.cumulative_bytes,
        "peak_bytes": {name.replace("-", "_"): size for name, size in manifest.predicted_peak_bytes.items()},
    }


def _show(document: dict[str, Any]) -> None:
    from cloud_server.cli.output import print_facts

    cut = document["cut"]
    side = "edge-only, no tail" if cut["k"] == cut["n"] else f"after {cut['name']}"
    lines = {
        "bundle": document["bundle"],
        "digest": document["digest"],
        "cut": f"{cut['k']} of {cut['n']}, {side}",
        "precision": document["precision"],
        "head": format_size(document["head_bytes"]),
        "tail": format_size(document["tail_bytes"]),
        "feature": f"{format_size(document['feature_bytes'])} a sample",
        "size by the cumulative rule": format_size(document["cumulative_bytes"]),
    }
    lines |= {
        f"predicted peak, {name.replace('_', '-')}": format_size(size) for name, size in document["peak_bytes"].items()
    }
    print_facts(lines)
