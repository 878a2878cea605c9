"""Options that several commands share: what an allocation is asked for, and where the registry is.

``splitfleet allocate`` and ``splitfleet serve --allocate-task`` take the same thresholds::

    @click.command()
    @click.option("--task", required=True)
    @allocation_options
    def allocate(task: str, settings: MakeSettings) -> None:
        wanted = settings(task=task)            # an AllocationSettings
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cloud_server.allocation.settings import (
    LATENCY_STATISTICS,
    MEMORY_MODELS,
    REDRAWS,
    AllocationSettings,
    Thresholds,
)
from edge_sdk.errors import ConfigError

if TYPE_CHECKING:
    from cloud_server.registry import Registry

Function = Callable[..., Any]
MakeSettings = Callable[..., AllocationSettings]

_THRESHOLDS = ("min_accuracy", "max_latency_ms", "latency_statistic")
_DEFAULTS = AllocationSettings(task="")


class DeviceIds(click.ParamType[tuple[str, ...]]):
    """Device ids, separated by commas."""

    name = "id,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        ids = tuple(part.strip() for part in str(value).split(","))
        if not all(ids):
            self.fail(f"{value!r} holds an empty device id", param, ctx)
        return tuple(dict.fromkeys(ids))


_OPTIONS = (
    click.option("--devices", type=DeviceIds(), default=(), help="Only these devices.  [default: all registered]"),
    click.option(
        "--min-accuracy", type=click.FloatRange(0.0, 1.0), help="Accuracy that each device must reach, 0 to 1."
    ),
    click.option(
        "--max-latency-ms",
        type=click.FloatRange(min=0.0, min_open=True),
        help="Latency of a request that no device may exceed.",
    ),
    click.option(
        "--latency-statistic",
        type=click.Choice(LATENCY_STATISTICS),
        default=_DEFAULTS.thresholds.latency_statistic,
        show_default=True,
        help="Which statistic of the latency the threshold is for.",
    ),
    click.option(
        "--latency-samples",
        type=click.IntRange(min=1),
        default=_DEFAULTS.latency_samples,
        show_default=True,
        help="Requests, one after another, that the latency is measured over.",
    ),
    click.option(
        "--redraw",
        type=click.Choice(REDRAWS),
        default=_DEFAULTS.redraw,
        show_default=True,
        help="Who draws anew in a round: all that fall short, or the least accurate and the slowest of them.",
    ),
    click.option(
        "--memory-model",
        type=click.Choice(MEMORY_MODELS),
        default=_DEFAULTS.memory_model,
        show_default=True,
        help="The rule that picks the cut for a memory budget.",
    ),
    click.option("--max-rounds", type=click.IntRange(min=1), help="Give up after so many rounds."),
    click.option(
        "--device-timeout",
        "device_timeout_s",
        type=click.FloatRange(min=0.0, min_open=True),
        default=_DEFAULTS.device_timeout_s,
        show_default=True,
        help="Seconds that a device may be silent or make no progress.",
    ),
    click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Makes the draws repeatable."),
    click.option("--baselines", is_flag=True, help="Measure cloud-only and edge-only beside each accepted split."),
)


def allocation_options(function: Function) -> Function:
    """Add the options of an allocation; the command gets ``settings``, which makes ``AllocationSettings`` of a task."""
    names = tuple(AllocationSettings.__dataclass_fields__.keys() - {"task", "thresholds"})

    @functools.wraps(function)
    def with_settings(**options: Any) -> Any:
        thresholds = Thresholds(**{name: options.pop(name) for name in _THRESHOLDS})
        chosen = {name: options.pop(name) for name in names}
        return function(settings=functools.partial(AllocationSettings, thresholds=thresholds, **chosen), **options)

    return _apply(_OPTIONS, with_settings)


def given_allocation_options() -> list[str]:
    """The options of an allocation that are on the command line of the command that runs."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in (*_THRESHOLDS, *AllocationSettings.__dataclass_fields__)
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def registry_options(function: Function) -> Function:
    """Add ``--home`` and ``--registry``; the command gets ``home`` (a path or ``None``) and ``registry`` (a URL or
    ``None``: the registry of the home).
    """
    return _apply(
        (
            click.option(
                "--home",
                type=click.Path(file_okay=False, path_type=Path),
                help="Folder of registry, artifacts and caches.  [default: $SPLITFLEET_HOME or the user's data folder]",
            ),
            click.option(
                "--registry", metavar="URL", help="Database URL of the registry.  [default: SQLite in the home folder]"
            ),
        ),
        function,
    )


def open_registry(home: Path | None, registry: str | None, *, reading: bool = False) -> Registry:
    """The registry that :func:`registry_options` name; it is created when it does not exist.

    Not for a command that is only ``reading``, in a home that is named: that is a slip of the pen. Raises
    :class:`ConfigError` then.
    """
    from cloud_server.home import Home
    from cloud_server.registry import Registry

    if reading and registry is None and home is not None and not Home(path=home.absolute()).registry_file.exists():
        raise ConfigError(
            f"--home {home} has no registry: nothing was ever recorded there; name the folder that the server has"
        )
    return Registry(registry or Home.at(home).registry_url)


def _apply(options: tuple[Callable[[Function], Function], ...], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function
