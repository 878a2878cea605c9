"""Options that the commands about one model share: which model, how to load it, and for which memory budget.

::

    @click.command()
    @model_options
    @budget_options
    def cuts(model: ModelChoice, budget: Budget | None, …) -> None:
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.allocation.settings import MEMORY_MODELS, AllocationSettings
from edge_sdk.command import SizeType

if TYPE_CHECKING:
    from cloud_server.cut_report import Budget
    from cloud_server.models import LoadOptions, ModelSource

Function = Callable[..., Any]
InputShape = tuple[str | None, tuple[int, ...]]


class InputShapeType(click.ParamType[InputShape]):
    """``224,224,3`` or ``image=224,224,3``: the shape of an input without its batch axis."""

    name = "[input=]size,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> InputShape:
        if isinstance(value, tuple):
            return value
        name, found, sizes = str(value).rpartition("=")
        try:
            shape = tuple(int(size) for size in sizes.split(","))
        except ValueError:
            shape = ()
        if not shape or any(size < 1 for size in shape) or (found and not name):
            self.fail(
                f"{value!r} is not a shape: expected sizes of 1 or more without the batch axis, such as 224,224,3 or "
                "image=224,224,3",
                param,
                ctx,
            )
        return (name or None, shape)


class ObjectPath(click.ParamType[str]):
    """``module:attribute``, an importable object."""

    name = "module:attr"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        module, _, attribute = str(value).partition(":")
        parts = (*module.split("."), *attribute.split("."))
        if not all(part.isidentifier() for part in parts):
            self.fail(f"{value!r} is not module:attribute, such as my_layers:Gate", param, ctx)
        return str(value)


@dataclass(frozen=True, kw_only=True)
class LoadingChoice:
    """How a user wants model files loaded, as typed."""

    custom_objects: tuple[str, ...] = ()
    input_shapes: tuple[InputShape, ...] = ()
    unsafe: bool = False

    def options(self) -> LoadOptions:
        """As :mod:`cloud_server.models` takes it; a shape is given for one input once."""
        from cloud_server.models import LoadOptions

        names = [name for name, _ in self.input_shapes]
        if len(set(names)) != len(names) or (None in names and len(names) > 1):
            raise click.UsageError(
                "--input-shape: give one shape for a model of one input, or name=shape once for each input"
            )
        return LoadOptions(custom_objects=self.custom_objects, input_shapes=self.input_shapes, unsafe=self.unsafe)


# Not from converters.precision, which imports numpy: --help is to be quick.
PRECISIONS = ("int8", "int8-weights", "float16", "float32")

_LOADING_OPTIONS = (
    click.option(
        "--custom-objects",
        multiple=True,
        type=ObjectPath(),
        help="A layer or function of your own that the file needs; may be repeated. "
        "Modules are looked for in the current folder too.",
    ),
    click.option(
        "--input-shape",
        "input_shapes",
        multiple=True,
        type=InputShapeType(),
        help="Fixes free dimensions of an input, such as 224,224,3 or image=224,224,3; may be repeated.",
    ),
    click.option(
        "--unsafe",
        is_flag=True,
        help="Run the Python code that a file may hold (Lambda layers), with all your rights: trusted files only.",
    ),
)


def loading_options(function: Function) -> Function:
    """Add the options of loading a model file; the command gets ``loading``, a :class:`LoadingChoice`."""

    @functools.wraps(function)
    def with_loading(
        *, custom_objects: tuple[str, ...], input_shapes: tuple[InputShape, ...], unsafe: bool, **options: Any
    ) -> Any:
        loading = LoadingChoice(custom_objects=custom_objects, input_shapes=input_shapes, unsafe=unsafe)
        return function(loading=loading, **options)

    for option in reversed(_LOADING_OPTIONS):
        with_loading = option(with_loading)
    return with_loading


def model_options(function: Function) -> Function:
    """Add the argument MODEL and the options of loading it; the command gets ``model`` and ``loading``."""
    return click.argument("model", metavar="MODEL")(loading_options(function))


def budget_options(function: Function) -> Function:
    """Add ``--profile``, ``--ram`` and ``--memory-model``; the command gets ``memory_model`` and ``budget``, a
    :class:`Budget` or ``None``.
    """

    @functools.wraps(function)
    def with_budget(*, profile: str | None, ram: int | None, **options: Any) -> Any:
        return function(budget=_budget(profile, ram), **options)

    decorated: Function = with_budget
    for option in reversed(_BUDGET_OPTIONS):
        decorated = option(decorated)
    return decorated


_BUDGET_OPTIONS = (
    click.option("--profile", help="A device profile, by name or file: its memory budget and its runtime."),
    click.option("--ram", metavar="SIZE", type=SizeType(), help="The memory budget of the head itself, such as 8MB."),
    click.option(
        "--memory-model",
        type=click.Choice(MEMORY_MODELS),
        default=AllocationSettings(task="").memory_model,
        show_default=True,
        help="The rule that picks the cut for a memory budget: the deepest whose predicted growth of the process fits, "
        "or the classic sum of layer sizes.",
    ),
)


def _budget(profile: str | None, ram: int | None) -> Budget | None:
    from cloud_server.cut_report import Budget

    if profile is not None and ram is not None:
        raise click.UsageError("--profile and --ram both set the memory budget: give one of them")
    if profile is not None:
        import device_profiles

        known = device_profiles.load(Path(profile) if Path(profile).is_file() else profile)
        return Budget(budget_bytes=known.memory_budget_bytes, runtime=known.runtime, profile=known.name)
    return None if ram is None else Budget(budget_bytes=ram)


def find_source(text: str, loading: LoadingChoice, *, home: Path | None, registry: str | None) -> ModelSource:
    """The model that a user calls ``text``. Raises :class:`ConfigError` when there is none."""
    from cloud_server.models import REGISTRY, ZOO, file_source, zoo_source

    options = loading.options()
    kind = next((kind for kind in (ZOO, REGISTRY) if text.startswith(kind)), None)
    if kind is not None and loading != LoadingChoice():
        raise click.UsageError(f"{text} knows how it is loaded: leave out --custom-objects, --input-shape and --unsafe")
    name = text.removeprefix(kind or "")
    if kind == ZOO:
        return zoo_source(name)
    if kind is None:
        return file_source(Path(text), options)
    from cloud_server.cli.allocation_options import open_registry
    from cloud_server.home import Home
    from cloud_server.library import Library

    with open_registry(home, registry) as opened:
        library = Library(opened, Home.at(home))
        return library.source(library.model(name))
