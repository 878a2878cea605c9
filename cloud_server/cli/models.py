"""`splitfleet models`: models that a user brings, beside those of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.allocation_options import registry_options
from cloud_server.cli.model_options import LoadingChoice, loading_options
from cloud_server.cli.output import json_option
from cloud_server.cli.tasks import open_library, say_removed

if TYPE_CHECKING:
    from cloud_server.registry.library import ModelRecord


@click.group()
def models() -> None:
    """Keras models of yours, each for a task; other commands call them registry:NAME."""


@models.command()
@click.argument("name")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--task", required=True, help="The task that it is a model of: one of yours, or one of the zoo.")
@loading_options
@registry_options
@json_option
def add(
    name: str,
    file: Path,
    task: str,
    loading: LoadingChoice,
    home: Path | None,
    registry: str | None,
    as_json: bool,
) -> None:
    """Add the model in FILE (.keras, or legacy .h5 or .hdf5) under NAME; the file is copied.

    The model must take the inputs of the task's data. Where it has one input, the name of the input does not matter.
    """
    from cloud_server.cli.waiting import waiting
    from cloud_server.home import Home
    from converters import Workshop

    with (
        open_library(home, registry) as library,
        Workshop(Home.at(home).conversions, workers=1) as workshop,
        waiting(f"reading {file}"),
    ):
        record = library.add_model(
            name, file, task=task, options=loading.options(), outline=lambda recipe: workshop.outline(recipe).result()
        )
    _show(_document(record), as_json=as_json)


@models.command("list")
@click.option("--task", help="Only the models of this task.")
@registry_options
@json_option
def list_models(task: str | None, home: Path | None, registry: str | None, as_json: bool) -> None:
    """List all models: yours, and those of the zoo."""
    import zoo_keras
    from cloud_server.cli.output import Group, grouped_table, print_json, stdout
    from edge_sdk.sizes import format_size

    with open_library(home, registry) as library:
        if task is not None and task not in zoo_keras.tasks():
            library.task(task)
        documents = _zoo() + [_document(record) for record in library.models()]
    if task is not None:
        documents = [model for model in documents if model["task"] == task]
    if as_json:
        print_json({"models": documents})
        return
    groups = (
        Group(("model", "task")),
        Group(("from",)),
        *(Group((figure,), right=True) for figure in ("operations", "parameters", "file")),
    )
    rows = [
        (
            (model["source"], model["task"]),
            (model["from"],),
            ("" if model["operations"] is None else str(model["operations"]),),
            (f"{model['parameters']:,}",),
            (format_size(model["file_bytes"]),),
        )
        for model in documents
    ]
    console = stdout()
    console.print(grouped_table(groups, rows, width=console.width))


@models.command()
@click.argument("name")
@registry_options
@json_option
def show(name: str, home: Path | None, registry: str | None, as_json: bool) -> None:
    """Show the model NAME of yours, and how its file is loaded."""
    with open_library(home, registry) as library:
        record = library.model(name)
    _show(_document(record), as_json=as_json)


@models.command()
@click.argument("name")
@registry_options
@json_option
def remove(name: str, home: Path | None, registry: str | None, as_json: bool) -> None:
    """Remove the model NAME of yours and its file. What was allocated of it goes on working."""
    with open_library(home, registry) as library:
        library.remove_model(name)
    say_removed("model", name, as_json=as_json)


def _zoo() -> list[dict[str, Any]]:
    import zoo_keras
    from edge_sdk.errors import ConfigError

    documents = []
    for task in zoo_keras.tasks():
        for name in zoo_keras.task(task).models:
            try:
                info = zoo_keras.model_info(task, name)
            except ConfigError:
                continue
            documents.append(
                {
                    "name": name,
                    "source": f"zoo:{name}",
                    "task": task,
                    "from": "zoo",
                    "operations": None,
                    "parameters": info.parameters,
                    "file_bytes": info.weights_bytes,
                }
            )
    return documents


def _document(record: ModelRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "source": f"registry:{record.name}",
        "task": record.task,
        "from": "user",
        "operations": record.operations,
        "parameters": record.parameters,
        "file_bytes": record.file_bytes,
        "file_sha256": record.file_sha256,
        "model_sha256": record.model_sha256,
        "format": record.suffix,
        "custom_objects": list(record.custom_objects),
        "input_shapes": [{"input": name, "shape": list(shape)} for name, shape in record.input_shapes],
        "unsafe": record.unsafe,
        "added_at": record.added_at.isoformat(),
    }


def _show(document: dict[str, Any], *, as_json: bool) -> None:
    from cloud_server.cli.output import print_facts, print_json
    from edge_sdk.sizes import format_size

    if as_json:
        print_json(document)
        return
    shapes = ", ".join(
        f"{each['input'] or 'input'} {'×'.join(map(str, each['shape']))}" for each in document["input_shapes"]
    )
    lines = {
        "model": document["source"],
        "task": document["task"],
        "operations": document["operations"],
        "parameters": f"{document['parameters']:,}",
        "file": f"{format_size(document['file_bytes'])} {document['format']}, SHA-256 {document['file_sha256']}",
        "custom objects": ", ".join(document["custom_objects"]),
        "input shapes": shapes,
        "may run code": "yes (--unsafe)" if document["unsafe"] else "",
    }
    shown = {key: value for key, value in lines.items() if value != ""}
    print_facts(shown)
