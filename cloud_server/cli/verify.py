"""`splitfleet verify`: prove a bundle."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.allocation_options import registry_options
from cloud_server.cli.model_options import LoadingChoice, find_source, loading_options
from cloud_server.cli.output import json_option
from edge_sdk.errors import BundleError, ConfigError, IntegrityError, InvalidInputError

if TYPE_CHECKING:
    from cloud_server.models import ModelSource
    from cloud_server.task_files import Array
    from converters.verification import RuntimeCheck, Verification
    from edge_sdk.bundle import Bundle

# As 'splitfleet split' has it for the features of a head.
MAX_ERROR = 0.25
# Between a head in int8 and its model in float; below it, the split is another classifier.
MIN_AGREEMENT = 0.9


@click.command()
@click.argument("bundle", metavar="BUNDLE", type=click.Path(path_type=Path))
@click.option(
    "--model", help="The model that the bundle was made of.  [default: found by its name, if it is of a task]"
)
@loading_options
@click.option(
    "--data",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Samples to compare with as .npz, an array (N, …) for each input.  [default: the task's validation set, else "
    "made-up ones]",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Another Python interpreter with splitfleet: runtimes that only it has run the head, too; may be repeated.",
)
@registry_options
@json_option
def verify(
    bundle: Path,
    model: str | None,
    loading: LoadingChoice,
    data: Path | None,
    pythons: tuple[Path, ...],
    home: Path | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Prove the bundle in the folder BUNDLE.

    Checks the files' hashes, runs the head on every TFLite runtime that is installed here or for a --python, then the
    tail, and compares both with the whole model; a tail.tflite is compared with the tail's SavedModel. Ends with 1 when
    a file differs, something does not run, an output's noise is above a quarter of its signal, or a classifier prefers
    the same class in fewer than 90 % of real samples.
    """
    from cloud_server.cli.output import print_json, stderr
    from edge_sdk.bundle import Bundle

    opened = Bundle.open(bundle)
    problems: list[str] = []
    found: Verification | None = None
    source: ModelSource | None = None
    samples: Mapping[str, Array] | None = None
    try:
        opened.verify()
    except IntegrityError as error:
        problems.append(error.message)
    else:
        source = _source(opened, model, loading, home, registry)
        samples, classifier = _samples(data, source)
        try:
            found = _verify(opened, source, samples, classifier=classifier, pythons=pythons)
        except InvalidInputError as error:
            raise InvalidInputError(f"{data or 'samples'}: {error.message}") from None
        problems += _problems(found, real=samples is not None, required=model is not None)
        if found.model_error and model is None:
            stderr().print(f"not compared with the model of that name: {found.model_error}", soft_wrap=True)
    document = _document(opened, found, source, samples, problems)
    if as_json:
        print_json(document)
    else:
        _show(document)
    if problems:
        raise BundleError(f"{bundle}: {'; '.join(problems)}")


def _source(
    bundle: Bundle, model: str | None, loading: LoadingChoice, home: Path | None, registry: str | None
) -> ModelSource | None:
    """The model to compare with: the one that is named, else the one of the task and name in the manifest."""
    if model is not None:
        return find_source(model, loading, home=home, registry=registry)
    if loading != LoadingChoice():
        raise click.UsageError("--custom-objects, --input-shape and --unsafe are for loading --model")
    made_of = bundle.manifest.model.name
    for text in (f"zoo:{bundle.manifest.task}/{made_of}", f"registry:{made_of}") if bundle.manifest.task else ():
        try:
            source = find_source(text, loading, home=home, registry=registry)
        except (ConfigError, IntegrityError):
            continue
        if source.task == bundle.manifest.task:
            return source
    return None


def _samples(data: Path | None, source: ModelSource | None) -> tuple[Mapping[str, Array] | None, bool]:
    """The samples to compare with, if there are real ones, and whether labels tell that the model is a classifier."""
    from cloud_server.task_files import read_samples

    if data is not None:
        return read_samples(data)
    if source is not None and source.validation is not None:
        return source.validation().inputs, True
    return None, False


def _verify(
    bundle: Bundle,
    source: ModelSource | None,
    samples: Mapping[str, Array] | None,
    *,
    classifier: bool,
    pythons: Sequence[Path],
) -> Verification:
    from cloud_server.cli.waiting import waiting
    from cloud_server.models import load_with_inputs
    from converters.verification import verify as prove

    load = None
    if source is not None:
        # As in a task: the bundle knows by which names the inputs of its model went.
        names = tuple(spec.name for spec in bundle.manifest.inputs)
        load = functools.partial(load_with_inputs, source.load, names)
    return prove(bundle, load, samples, classifier=classifier, pythons=pythons, doing=waiting)


def _problems(found: Verification, *, real: bool, required: bool) -> Iterator[str]:
    """What falls short. A model that was only found by its name may be another one by now: that is no problem."""
    if found.tail_error:
        yield found.tail_error
    if found.tail_tflite_error:
        yield found.tail_tflite_error
    if found.model_error and required:
        yield found.model_error
    if not found.runtimes:
        yield "no TFLite runtime can run here: install one with  pip install ai-edge-litert"
    for name, check in found.runtimes.items():
        if check.error:
            yield f"{name}: {check.error}"
        if check.comparison is None:
            continue
        if not check.comparison.relative_error <= MAX_ERROR:
            yield (
                f"{name}: the noise of an output is {check.comparison.relative_error:.2f} of its signal, "
                f"at most {MAX_ERROR} is accepted"
            )
        agreement = check.comparison.top1_agreement
        # Made-up samples belong to no class, and what is preferred then is chance.
        if real and agreement is not None and agreement < MIN_AGREEMENT:
            yield f"{name}: the same class in {agreement:.1%} of the samples, {MIN_AGREEMENT:.0%} is expected"


def _document(
    bundle: Bundle,
    found: Verification | None,
    source: ModelSource | None,
    samples: Mapping[str, Array] | None,
    problems: list[str],
) -> dict[str, Any]:
    checks = found.runtimes if found else {}
    comparisons = [check.comparison for check in checks.values() if check.comparison is not None]
    agreements = [each.top1_agreement for each in comparisons if each.top1_agreement is not None]
    return {
        "ok": not problems,
        "problems": problems,
        "bundle": str(bundle.path),
        "digest": bundle.digest,
        "model": bundle.manifest.model.name,
        "compared_with": source.name if source and comparisons else None,
        "samples": found.samples if found else 0,
        "real_samples": samples is not None,
        "max_abs_error": _number(max((each.max_abs_error for each in comparisons), default=None)),
        "mean_abs_error": _number(max((each.mean_abs_error for each in comparisons), default=None)),
        "relative_error": _number(max((each.relative_error for each in comparisons), default=None)),
        "top1_agreement": min(agreements, default=None),
        "tail_tflite": _tail_tflite(bundle, found),
        "runtimes": {name.replace("-", "_"): _runtime(check) for name, check in checks.items()},
    }


def _tail_tflite(bundle: Bundle, found: Verification | None) -> dict[str, Any] | None:
    """``None`` where there is none, or the SavedModel that it is compared with could not be loaded."""
    if found is None or found.tail_error or not bundle.manifest.has_tail_tflite:
        return None
    return {"ok": not found.tail_tflite_error, "error": found.tail_tflite_error}


def _runtime(check: RuntimeCheck) -> dict[str, Any]:
    comparison = check.comparison
    return {
        "ok": not check.error,
        "version": check.runtime.version,
        "python": str(check.runtime.python),
        "error": check.error,
        "max_abs_error": _number(comparison.max_abs_error) if comparison else None,
        "mean_abs_error": _number(comparison.mean_abs_error) if comparison else None,
        "relative_error": _number(comparison.relative_error) if comparison else None,
        "top1_agreement": comparison.top1_agreement if comparison else None,
    }


def _number(value: float | None) -> float | None:
    """JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _show(document: dict[str, Any]) -> None:
    from cloud_server.cli.output import make_table, stderr, stdout

    if not document["runtimes"]:
        return
    figures = ("max error", "mean error", "noise / signal", "same class")
    table = make_table("head on", "version", "runs", *figures, right=figures)
    for name, runtime in document["runtimes"].items():
        table.add_row(
            name.replace("_", "-"),
            runtime["version"],
            "yes" if runtime["ok"] else "no",
            *(
                "" if runtime[key] is None else f"{runtime[key]:.4g}"
                for key in ("max_abs_error", "mean_abs_error", "relative_error")
            ),
            "" if runtime["top1_agreement"] is None else f"{runtime['top1_agreement']:.1%}",
        )
    stdout().print(table)
    samples = f"{document['samples']} {'' if document['real_samples'] else 'made-up '}samples"
    if document["compared_with"] is None:
        stderr().print(f"run on {samples}; not compared with a model: name it with --model", soft_wrap=True)
    else:
        stderr().print(f"compared with {document['compared_with']} on {samples}", soft_wrap=True)
    if document["ok"]:
        click.echo("ok")
