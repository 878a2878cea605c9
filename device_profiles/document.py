"""YAML files that people write, read so that every complaint names the file, the line and the key.

A file is composed to YAML nodes first, which know their lines, and then built into a strict pydantic model. JSON is
YAML, so a ``.json`` file is read the same way. What the keys mean is left to the model.
"""

from __future__ import annotations

import difflib
import json
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from edge_sdk.errors import ConfigError, SplitfleetError
from edge_sdk.sizes import parse_size

MAX_FILE_BYTES = 1_000_000
# Aliases let a short file stand for an endless one.
MAX_NODES = 50_000
MAX_DEPTH = 32
MAX_SHOWN = 80
# A pebibyte: what exceeds it is a slip, and no other program should have to count that far.
MAX_SIZE_BYTES = 2**50

Location = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)


class StrictModel(BaseModel):
    """Base of what files are built into: frozen, no unknown key, no silent conversion."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except SplitfleetError as error:
        raise ValueError(error.message) from None


Size = Annotated[int, BeforeValidator(_size), Field(gt=0, le=MAX_SIZE_BYTES)]
"""A size of memory, more than none: text such as ``512MB``, or a whole number of bytes. Its value is in bytes."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of one file; ``lines`` maps the path of each key or list item to its line, counted from 1."""

    path: Path
    data: Any
    lines: dict[Location, int]

    def build(self, model: type[Model]) -> Model:
        """The document as ``model``. Raises :class:`ConfigError` with one line per mistake."""
        try:
            # The JSON mode of pydantic is strict, and yet takes a list for a tuple and a whole number for a float.
            return model.model_validate_json(json.dumps(self.data, default=str))
        except pydantic.ValidationError as error:
            details = sorted(error.errors(include_url=False), key=lambda detail: self.line(detail["loc"]))
            raise ConfigError(
                "\n".join(self.complaint(detail["loc"], _explain(model, detail)) for detail in details)
            ) from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.path}: a key of a map must be plain text ({error})") from None

    def complaint(self, location: Location, text: str) -> str:
        """``text`` with file, line and key before it."""
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
        return f"{self.path}, line {self.line(location)}" + (f", key {key!r}: {text}" if key else f": {text}")

    def line(self, location: Location) -> int:
        """The line of ``location``; of the map around it when it is missing there."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


def read_document(path: Path | str) -> Document:
    """Read a YAML or JSON file. Raises :class:`ConfigError` when it is missing, no YAML, or has a key twice."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has {len(data)} bytes, at most {MAX_FILE_BYTES} are read")
    try:
        loader = yaml.SafeLoader(data)
        try:
            node = loader.get_single_node()
            lines = _Lines(path)
            if node is not None:
                lines.visit(node, ())
            content = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    return Document(path=path, data=content, lines=lines.found)


class _Lines:
    """Collects the line of every key and item of a node tree."""

    def __init__(self, path: Path) -> None:
        self.found: dict[Location, int] = {}
        self._path = path

    def visit(self, node: yaml.Node, location: Location) -> None:
        if len(location) > MAX_DEPTH or len(self.found) > MAX_NODES:
            raise ConfigError(f"{self._path}, line {node.start_mark.line + 1}: nested too deeply, or too large")
        self.found.setdefault(location, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.visit(item, (*location, number))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name = str(key.value)
                if (*location, name) in self.found:
                    raise ConfigError(
                        f"{self._path}, line {key.start_mark.line + 1}, key {name!r}: is there twice; "
                        f"the first is in line {self.found[*location, name]}"
                    )
                self.found[*location, name] = key.start_mark.line + 1
                self.visit(value, (*location, name))


def _explain(model: type[BaseModel], detail: Any) -> str:
    kind, location, received = detail["type"], detail["loc"], detail["input"]
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        return "is not a key here; " + (f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}")
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    expected = detail["msg"].removeprefix("Input should be ")
    shown = json.dumps(received, default=str, ensure_ascii=False)
    return f"expected {expected}, received {shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + '…'}"


def _keys_at(model: type[BaseModel], location: Location) -> list[str]:
    """The keys that a map at ``location`` may have."""
    current = model
    for part in location:
        if isinstance(part, int):
            continue
        field = next(spec for name, spec in current.model_fields.items() if part == (spec.alias or name))
        nested = _model_in(field.annotation)
        if nested is None:
            return []
        current = nested
    return [spec.alias or name for name, spec in current.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := _model_in(inner)) is not None), None)
