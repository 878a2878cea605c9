"""The allocator of a server: the loop of ``splitfleet allocate`` in a process that the server starts and ends.

A process and not a thread, since its work would slow the answers whose latency it measures. It talks to the server
through the endpoint, like any allocator; the server goes on serving after it, whatever its result.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from threading import Thread
from types import TracebackType
from typing import NoReturn, Self

from cloud_server.allocation.settings import AllocationSettings
from cloud_server.home import Home
from edge_sdk.errors import SplitfleetError
from edge_sdk.keys import CurveKeys

_END_WITHIN_S = 10.0
_PR_SET_PDEATHSIG = 1


class AllocatorProcess:
    """A context manager: the process runs from entering until the allocation ended, at most until leaving."""

    def __init__(
        self,
        settings: AllocationSettings,
        *,
        endpoint: str,
        registry_url: str,
        home: Home,
        keys: CurveKeys | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``keys``: an operator's, where the server has CURVE on; they reach the process through a pipe. ``on_end`` is
        called in some thread when the process has ended by itself.
        """
        # Spawned: a fork would inherit the server's sockets and locks, but not the threads that use them.
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(os.getpid(), settings, endpoint, registry_url, home, keys), name="allocator"
        )
        self._on_end = on_end
        self._leaving = False
        self._watch = Thread(target=self._await_end, name="end of the allocator", daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._watch.start()
        return self

    def _await_end(self) -> None:
        wait([self._process.sentinel])
        if not self._leaving:
            self._on_end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        if self._process.pid is not None and self._process.is_alive():
            # So that it ends its run in the registry, and the processes that convert for it.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)
        self._process.join(_END_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._watch.join()
        self._process.close()


def _run(
    server_pid: int, settings: AllocationSettings, endpoint: str, registry_url: str, home: Home, keys: CurveKeys | None
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt_once)
    # A server that is killed cannot end it: the kernel tells it then.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != server_pid:
        sys.exit(130)

    from cloud_server.allocation import run_allocation
    from cloud_server.cli.allocation_progress import AllocationProgress
    from cloud_server.cli.allocation_table import allocation_table
    from cloud_server.cli.output import stderr

    console = stderr()
    try:
        with AllocationProgress(console) as progress:
            result = run_allocation(
                settings,
                endpoint=endpoint,
                registry_url=registry_url,
                home=home,
                observer=progress,
                wait_for_devices=True,
                keys=keys,
            )
        console.print(allocation_table(result))
        result.raise_if_incomplete()
    except SplitfleetError as error:
        console.print(f"the allocation of {settings.task} ended: {error.message}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _interrupt_once(*_: object) -> NoReturn:
    # The server sends one, and the kernel another when the server ends: the second must not break off its tidying up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
