"""What is loaded by whom: no TensorFlow on a device, and nothing heavy for a ``--help``."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

PROGRAMS = {"splitfleet": "cloud_server.cli", "splitfleet-edge": "edge_sdk.cli"}
# What takes long to load and is not needed to print a help text.
HEAVY = {
    "ai_edge_litert",
    "alembic",
    "keras",
    "numpy",
    "pydantic",
    "rich",
    "sqlalchemy",
    "tensorflow",
    "tflite_runtime",
    "yaml",
    "zmq",
}

WALK = """
import importlib, json, click
found = []
def walk(command, path):
    found.append(path)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            walk(command.get_command(context, name), [*path, name])
walk(importlib.import_module({module!r}).cli, [])
print(json.dumps(found))
"""

HELP = """
import contextlib, importlib, io, json, sys
text = io.StringIO()
with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
    importlib.import_module({module!r}).cli.main([*{path!r}, "--help"], prog_name={program!r})
print(json.dumps([text.getvalue(), sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def python(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@cache
def commands() -> list[tuple[str, tuple[str, ...]]]:
    return [
        (program, tuple(path))
        for program, module in PROGRAMS.items()
        for path in json.loads(python(WALK.format(module=module)))
    ]


def test_both_programs_have_commands() -> None:
    assert {("splitfleet", ("allocate",)), ("splitfleet-edge", ("run",))} <= set(commands())


def test_every_help_answers_and_loads_nothing_heavy() -> None:
    faults = {}
    for program, path in commands():
        text, modules = json.loads(python(HELP.format(module=PROGRAMS[program], path=list(path), program=program)))
        heavy = HEAVY & set(modules)
        if heavy or not text.startswith("Usage: "):
            faults[" ".join((program, *path))] = sorted(heavy) or text
    assert not faults


@pytest.mark.parametrize("package", ["edge_sdk", "device_profiles", "converters", "zoo_keras", "cloud_server"])
def test_importing_a_package_loads_no_tensorflow(package: str) -> None:
    modules = json.loads(python(f"import json, sys, {package}; print(json.dumps(sorted(sys.modules)))"))
    assert not {"tensorflow", "keras"} & set(modules)


def test_the_whole_device_side_loads_no_tensorflow_and_no_other_package() -> None:
    program = """
import importlib, json, pkgutil, sys
import edge_sdk
for module in pkgutil.walk_packages(edge_sdk.__path__, "edge_sdk."):
    importlib.import_module(module.name)
from edge_sdk import SplitClient
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    modules = set(json.loads(python(program)))
    assert not modules & {"tensorflow", "keras", "cloud_server", "converters", "zoo_keras", "device_profiles"}


def test_the_public_names_of_the_sdk() -> None:
    program = """
import edge_sdk, json
print(json.dumps([sorted(edge_sdk.__all__), [getattr(edge_sdk, name) is None for name in edge_sdk.__all__]]))
"""
    names, missing = json.loads(python(program))
    assert {"SplitClient", "InferReply", "Timing", "Bundle", "SplitfleetError"} <= set(names)
    assert not any(missing)
