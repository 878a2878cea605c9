"""`splitfleet tasks`: tasks that a user brings, beside those of the zoo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.allocation_options import registry_options
from cloud_server.cli.output import json_option

if TYPE_CHECKING:
    from cloud_server.library import Library
    from cloud_server.registry.library import TaskRecord

SET = click.Path(dir_okay=False, path_type=Path)


@click.group()
def tasks() -> None:
    """What is to be inferred, and on which labelled data.

    The models of a task take the same inputs; 'splitfleet models add' brings yours, 'splitfleet allocate --task' gives
    them to devices.
    """


@tasks.command()
@click.argument("name")
@click.option(
    "--validation",
    required=True,
    metavar="FILE",
    type=SET,
    help="What allocations are decided on: an .npz file with an array (N, …) for each input, and 'labels' (N,).",
)
@click.option(
    "--calibration",
    required=True,
    metavar="FILE",
    type=SET,
    help="Samples from the training data that tell the range of every tensor, as .npz; labels are not needed.",
)
@click.option("--test", metavar="FILE", type=SET, help="Like the validation set; looked at once, after all is decided.")
@click.option("--metric", default="accuracy", show_default=True, help="How outputs are scored against the labels.")
@registry_options
@json_option
def add(
    name: str,
    validation: Path,
    calibration: Path,
    test: Path | None,
    metric: str,
    home: Path | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Add the task NAME; the files are copied."""
    with open_library(home, registry) as library:
        record = library.add_task(name, validation=validation, calibration=calibration, test=test, metric=metric)
    _show([_document(record, ())], as_json=as_json)


@tasks.command("list")
@registry_options
@json_option
def list_tasks(home: Path | None, registry: str | None, as_json: bool) -> None:
    """List all tasks: yours, and those of the zoo."""
    from cloud_server.cli.output import Group, grouped_table, print_json, stdout

    documents = _all(home, registry)
    if as_json:
        print_json({"tasks": documents})
        return
    groups = (
        Group(("task", "metric")),
        Group(("from",)),
        Group(_COUNTS, right=True),
        Group(("models",), text=True),
    )
    rows = [
        (
            (task["name"], task["metric"]),
            (task["from"],),
            tuple("" if task[key] is None else str(task[key]) for key in _SAMPLES),
            (", ".join(task["models"]),),
        )
        for task in documents
    ]
    console = stdout()
    console.print(grouped_table(groups, rows, width=console.width))


@tasks.command()
@click.argument("name")
@registry_options
@json_option
def show(name: str, home: Path | None, registry: str | None, as_json: bool) -> None:
    """Show the task NAME: its inputs, data and models."""
    documents = [task for task in _all(home, registry) if task["name"] == name]
    if not documents:
        with open_library(home, registry) as library:
            library.task(name)
    _show(documents, as_json=as_json)


@tasks.command()
@click.argument("name")
@registry_options
@json_option
def remove(name: str, home: Path | None, registry: str | None, as_json: bool) -> None:
    """Remove the task NAME of yours and its data; its models must be removed before."""
    with open_library(home, registry) as library:
        library.remove_task(name)
    say_removed("task", name, as_json=as_json)


@contextmanager
def open_library(home: Path | None, registry: str | None) -> Iterator[Library]:
    """The library of the home and registry that are asked for."""
    from cloud_server.cli.allocation_options import open_registry
    from cloud_server.home import Home
    from cloud_server.library import Library

    with open_registry(home, registry) as opened:
        yield Library(opened, Home.at(home))


def say_removed(what: str, name: str, *, as_json: bool) -> None:
    """Tell that it is gone."""
    from cloud_server.cli.output import print_json

    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"{what} {name} is removed", err=True)


_SAMPLES = ("validation_samples", "calibration_samples", "test_samples")
_COUNTS = ("validation", "calibration", "test")


def _all(home: Path | None, registry: str | None) -> list[dict[str, Any]]:
    with open_library(home, registry) as library:
        models: dict[str, list[str]] = {}
        for model in library.models():
            models.setdefault(model.task, []).append(model.name)
        own = [_document(record, models.get(record.name, ())) for record in library.tasks()]
    return _zoo(models) + own


def _zoo(models: dict[str, list[str]]) -> list[dict[str, Any]]:
    import zoo_keras
    from cloud_server.task_checks import zoo_facts

    documents = []
    for name in zoo_keras.tasks():
        task = zoo_keras.task(name)
        facts = zoo_facts(name)
        documents.append(
            {
                "name": name,
                "from": "zoo",
                "metric": task.metric,
                "inputs": {key: _input(facts.inputs[key]) for key in facts.inputs},
                "classes": facts.classes,
                **{f"{split}_samples": len(task.samples(split)) for split in _COUNTS},
                "models": [*task.models, *models.get(name, ())],
                "added_at": None,
            }
        )
    return documents


def _document(record: TaskRecord, models: Any) -> dict[str, Any]:
    return {
        "name": record.name,
        "from": "user",
        "metric": record.metric,
        "inputs": {key: _input(facts) for key, facts in record.inputs.items()},
        "classes": record.classes,
        **{key: getattr(record, key) for key in _SAMPLES},
        "models": list(models),
        "added_at": record.added_at.isoformat(),
    }


def _input(facts: Any) -> dict[str, Any]:
    return {"shape": list(facts.shape), "dtype": facts.dtype}


def _show(documents: list[dict[str, Any]], *, as_json: bool) -> None:
    from cloud_server.cli.output import print_facts, print_json

    (task,) = documents
    if as_json:
        print_json(task)
        return
    inputs = ", ".join(
        f"{name} {'×'.join(map(str, facts['shape'])) or 'scalar'} {facts['dtype']}"
        for name, facts in task["inputs"].items()
    )
    lines = {
        "task": f"{task['name']} (of the {task['from']})",
        "metric": task["metric"],
        "inputs": inputs,
        "classes": task["classes"],
        **{key.replace("_", " "): task[key] for key in _SAMPLES if task[key] is not None},
        "models": ", ".join(task["models"]) or "none yet; 'splitfleet models add' adds one",
    }
    print_facts(lines)
