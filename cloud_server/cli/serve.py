"""``splitfleet serve``: run the cloud server in the foreground."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloud_server.cli.allocation_options import (
    MakeSettings,
    allocation_options,
    given_allocation_options,
    registry_options,
)
from cloud_server.cli.serving_options import Say, ServingOptions, serving_options
from edge_sdk.command import CheckedText
from edge_sdk.endpoints import check_bind_endpoint
from edge_sdk.errors import ConfigError

if TYPE_CHECKING:
    from cloud_server.allocation.settings import AllocationSettings
    from cloud_server.curve import ServerCurve
    from cloud_server.home import Home
    from cloud_server.registry import Registry
    from cloud_server.server import Server
    from cloud_server.supervisor import Post
    from edge_sdk.keys import CurveKeys

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"


@click.command()
@click.option(
    "--bind",
    type=CheckedText("endpoint", check_bind_endpoint),
    metavar="ENDPOINT",
    default=DEFAULT_ENDPOINT,
    show_default=True,
    help="Where to listen.",
)
@registry_options
@click.option(
    "--key",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Secret key of this server, from 'splitfleet keys server new'. Turns CURVE on: only allowed keys get in, and "
    "other machines may be served.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write endpoint and process id (the one to signal) there, as JSON, once the server answers.",
)
@serving_options
@click.option("--allocate-task", metavar="TASK", help="Allocate the fleet for this task, beside serving it.")
@allocation_options
def serve(
    bind: str,
    home: Path | None,
    registry: str | None,
    key: Path | None,
    ready_file: Path | None,
    serving: ServingOptions,
    allocate_task: str | None,
    settings: MakeSettings,
) -> None:
    """Run the cloud server until it is interrupted; interrupted twice, it ends at once. A server that dies is started
    again where it was.

    The options of an allocation, from --devices on, are for --allocate-task.
    """
    from cloud_server.home import Home
    from cloud_server.supervisor import Supervisor

    given = given_allocation_options()
    if given and allocate_task is None:
        raise click.UsageError(f"without --allocate-task there is no allocation that takes {', '.join(given)}")
    at = Home.at(home)
    wanted = _Wanted(
        bind=bind,
        home=at,
        registry_url=registry or at.registry_url,
        key=key,
        ready_file=ready_file,
        serving=serving,
        allocation=None if allocate_task is None else settings(task=allocate_task),
    )
    _allow_descriptors()
    # What is taken here stays over the deaths of the server's process.
    with at.claim("server"), serving.log_to_stderr() as say:
        code = Supervisor(partial(_serve, wanted, say), memory_cap_bytes=serving.memory_cap_bytes).run()
    sys.exit(code)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What was asked for on the command line."""

    bind: str
    home: Home
    registry_url: str
    key: Path | None
    ready_file: Path | None
    serving: ServingOptions
    allocation: AllocationSettings | None


def _allow_descriptors() -> None:
    """As many open files as this user may have: each peer takes one, and a shell allows 1024 where it says nothing."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _serve(wanted: _Wanted, say: Say, post: Post) -> None:
    """In a process of its own: serve until a signal, where ``post`` says that an earlier one did."""
    from cloud_server.registry import Registry
    from cloud_server.supervisor import Standing

    before = post.standing
    allocated = before is not None and before.allocated
    bind, http_at = (wanted.bind, wanted.serving.http) if before is None else (before.endpoint, before.http)
    with Registry(wanted.registry_url) as records, ExitStack() as beside:
        if wanted.allocation is not None and not allocated:
            _require_task(wanted.allocation.task, records, wanted.home)
        curve = None if wanted.key is None else _Curve.read(wanted.key, wanted.home)
        server = _make(bind, wanted.home, records, None if curve is None else curve.server, wanted.serving, beside)
        http = None if http_at is None else beside.enter_context(_monitor(http_at, server))
        _stop_on_signal(server)
        if wanted.ready_file is not None:
            _write_ready(wanted.ready_file, server.endpoint, http, post.pid)
        # Before anybody hears that it serves: whoever does may rely on its coming back.
        post.tell(Standing(endpoint=server.endpoint, http=http, allocated=allocated))
        if http is not None:
            say(f"figures are at http://{http}/metrics")
        say(f"splitfleet serves at {server.endpoint}{' with CURVE' if curve else ''}; stop it with Ctrl-C")
        if wanted.allocation is not None and not allocated:
            from cloud_server.allocator_process import AllocatorProcess

            allocator = AllocatorProcess(
                wanted.allocation,
                endpoint=server.endpoint,
                registry_url=wanted.registry_url,
                home=wanted.home,
                keys=None if curve is None else curve.allocator,
                on_end=post.tell_allocated,
            )
            beside.enter_context(allocator)
        # What is here by now stays: a search for garbage in it would hold all peers up.
        gc.freeze()
        ended = server.run()
    say("splitfleet has stopped")
    if not ended:
        # A thread that still reads or writes files must not keep the process from ending.
        os._exit(0)


@dataclass(frozen=True)
class _Curve:
    """What CURVE takes here: the server's side of it, and a key for the server's own allocator, gone when it ends."""

    server: ServerCurve
    allocator: CurveKeys

    @classmethod
    def read(cls, key: Path, home: Home) -> _Curve:
        from cloud_server.allow_list import AllowList, Holder, Role
        from cloud_server.curve import ServerCurve
        from cloud_server.guard import Guard
        from edge_sdk.keys import CurveKeys, make_key_pair, read_secret

        own, secret = read_secret(key)
        if own.role not in ("server", ""):
            raise ConfigError(f"--key {key} is the key of the {own.role} {own.name!r}, not of a server")
        public, allocator = make_key_pair()
        guest = Holder(name="the server's own allocator", role=Role.OPERATOR, public=public)
        guard = Guard(AllowList(home.allowed_keys), guests=(guest,))
        return cls(
            server=ServerCurve(secret=secret, guard=guard),
            allocator=CurveKeys(public=public, secret=allocator, server=own.public),
        )


def _make(
    bind: str,
    home: Home,
    registry: Registry,
    curve: ServerCurve | None,
    serving: ServingOptions,
    beside: ExitStack,
) -> Server:
    from cloud_server.blob_calls import BlobCalls
    from cloud_server.fleet import Fleet
    from cloud_server.loop import Loop
    from cloud_server.repository import ArtifactRepository
    from cloud_server.router import Router
    from cloud_server.server import Server
    from cloud_server.tails import TailHost

    repository = ArtifactRepository(home.repository)
    router = Router(bind, curve=curve)
    loop = Loop()
    launch = beside.enter_context(serving.launcher(loop, home.engines))
    tails = TailHost(
        repository, home.tails, loop=loop, launch=launch, limits=serving.limits(), crew=serving.crew_limits()
    )
    return Server(
        router,
        loop=loop,
        fleet=Fleet(),
        tails=tails,
        blobs=BlobCalls(repository),
        registry=registry,
        grace_s=serving.grace_s,
    )


def _require_task(name: str, records: Registry, home: Home) -> None:
    """Raises :class:`ConfigError` for a task that nobody has, before anybody waits for devices."""
    import zoo_keras
    from cloud_server.library import Library

    if name not in zoo_keras.tasks():
        Library(records, home).task(name)


def _stop_on_signal(server: Server) -> None:
    stopping = False

    def stop(number: int, _: object) -> None:
        nonlocal stopping
        if stopping:
            # The allocator beside it is told by the kernel.
            os._exit(128 + number)
        stopping = True
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


@contextmanager
def _monitor(address: str, server: Server) -> Iterator[str]:
    """Answers over HTTP; gives the address that it got."""
    from cloud_server.monitor import Monitor

    with Monitor(address, server) as monitor:
        yield monitor.address


def _write_ready(path: Path, endpoint: str, http: str | None, pid: int) -> None:
    import json

    # Whoever waits for the file finds it complete.
    written = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        written.write_text(json.dumps({"endpoint": endpoint, "http": http, "pid": pid}))
        written.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {path}: cannot be written ({error.strerror})") from None
