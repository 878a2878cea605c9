"""The options of ``splitfleet serve`` that an operator turns: engine, batches, workers, the end, the log, HTTP."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_sdk.command import SizeType

if TYPE_CHECKING:
    from cloud_server.batches import BatchLimits
    from cloud_server.engines.choice import EngineChoice
    from cloud_server.loop import Loop
    from cloud_server.workers.crew import CrewLimits
    from cloud_server.workers.launch import Launch

Say = Callable[[str], None]
LEAST_MEMORY_CAP_BYTES = 10**9


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How to serve; ``http`` is the address to answer at over HTTP, if at all, and ``worker_memory_bytes`` what one
    worker may have, if not the default.
    """

    engine: EngineChoice
    max_batch: int
    batch_delay_ms: float
    workers: int
    worker_memory_bytes: int | None
    grace_s: float
    http: str | None
    log_format: str
    log_level: str
    memory_cap: int | None

    @property
    def memory_cap_bytes(self) -> int:
        """What the server's process may use, without those that it has started."""
        from edge_sdk.resources import Machine

        if self.memory_cap is not None:
            return self.memory_cap
        return max(Machine().ram_bytes() // 4, LEAST_MEMORY_CAP_BYTES)

    def limits(self) -> BatchLimits:
        """What goes together in a batch."""
        from cloud_server.batches import BatchLimits

        return BatchLimits(max_batch=self.max_batch, delay_s=self.batch_delay_ms / 1000)

    def crew_limits(self) -> CrewLimits:
        """How many workers, and what each may have."""
        from cloud_server.workers.crew import CrewLimits
        from cloud_server.workers.memory import default_budget

        return CrewLimits(workers=self.workers, memory_bytes=self.worker_memory_bytes or default_budget(self.workers))

    @contextmanager
    def launcher(self, loop: Loop, results: Path) -> Iterator[Launch]:
        """Starts worker processes, until leaving; ``results`` is where they remember which engine won."""
        from cloud_server.workers.launch import Launcher

        launcher = Launcher(loop, max_batch=self.max_batch, engine=self.engine, results=results)
        try:
            yield launcher
        finally:
            launcher.close()

    @contextmanager
    def log_to_stderr(self) -> Iterator[Say]:
        """Log on a duplicate of stderr's descriptor.

        Gives a function that says a line there: plain, or as an entry where the log is JSON.
        """
        import logging

        from cloud_server.logs import logging_to

        as_json = self.log_format == "json"
        with os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1) as stream:

            def say(line: str) -> None:
                print(line, file=stream, flush=True)

            with logging_to(stream, as_json=as_json, level=logging.getLevelNamesMapping()[self.log_level.upper()]):
                yield logging.getLogger("cloud_server").info if as_json else say


_OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(["auto", "tensorflow", "litert"]),
        default="auto",
        show_default=True,
        help="What runs tails; auto: what is fastest here and computes what TensorFlow does.",
    ),
    click.option(
        "--max-batch",
        type=click.IntRange(1, 256),
        default=32,
        show_default=True,
        help="How many samples of one tail run together at most.",
    ),
    click.option(
        "--batch-delay-ms",
        type=click.FloatRange(0, 1000),
        default=2.0,
        show_default=True,
        help="How long a free tail waits for as many requests as it had last; a lone one never waits.",
    ),
    click.option(
        "--workers",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        help="How many processes run tails. Each tail is in one of them; one that crashes takes down only its own.",
    ),
    click.option(
        "--worker-memory",
        "worker_memory_bytes",
        metavar="SIZE",
        type=SizeType(),
        help="Memory of one worker, such as 4GiB. Above it the tails that were idle for longest leave, and come back "
        "when they are asked for.  [default: 80 % of the machine's, divided by the workers]",
    ),
    click.option(
        "--grace",
        "grace_s",
        metavar="SECONDS",
        type=click.FloatRange(0, 3600),
        default=5.0,
        show_default=True,
        help="How long requests under way may take to end after SIGTERM or Ctrl-C.",
    ),
    click.option("--http", metavar="HOST:PORT", help="Answer /livez, /readyz and /metrics there, for Prometheus."),
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="json: a document a line.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning"]),
        default="info",
        show_default=True,
        help="info: requests that fail have a line, too; debug: all.",
    ),
    click.option(
        "--memory-cap",
        type=SizeType(),
        help="Memory at which the server's process, which a peer may flood, is ended and started anew.  "
        "[default: a quarter of the machine's, at least 1GB]",
    ),
)
_NAMES = (
    "engine",
    "max_batch",
    "batch_delay_ms",
    "workers",
    "worker_memory_bytes",
    "grace_s",
    "http",
    "log_format",
    "log_level",
    "memory_cap",
)


def serving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to ``command``, which gets them as ``serving``."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        serving = ServingOptions(**{name: values.pop(name) for name in _NAMES})
        return command(serving=serving, **values)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered
