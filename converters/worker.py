"""A worker: one process that runs jobs one after another, silently, and whose death is an error and not a hang.

TensorFlow's converter prints pages from C++, past Python's ``sys.stdout``, so the process sends its file descriptors 1
and 2 to a file. The end of that file is told when a job fails. That file, and the temporary files of jobs, are in a
folder that is removed when the process ends. A worker never outlives its parent, whatever it is at.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from converters.lifeline import end_with
from converters.scratch import Scratch, is_of_the_disk
from edge_sdk.errors import ConversionError, SplitfleetError, StorageError

LOG = "log"
LOG_CHARS = 2000

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """The parent's handle of the process, which starts with the first job and again after it died.

    One thread at a time may call :meth:`run`; any thread may call :meth:`kill`.
    """

    def __init__(self, threads: int, scratch: Path | None = None, *, gpu: bool = False) -> None:
        """``threads``: how many threads TensorFlow may use for one operation. ``scratch``: where the folder for
        temporary files is made, by default among the system's temporary files. ``gpu``: whether it may use one.
        """
        self._threads = threads
        self._gpu = gpu
        self._place = scratch
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._lifeline: Connection | None = None
        self._scratch: Scratch | None = None
        self._killed = False

    def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``job`` (a picklable function) in the process.

        Raises what the job raises if that is a :class:`SplitfleetError`, :class:`StorageError` where a file could not
        be read or written, else :class:`ConversionError`; its
        ``details["log"]`` is the end of what was printed, ``details["died"]`` is set where the process died of the job,
        ``details["closed"]`` where it was made to.
        """
        connection = self._started()
        try:
            connection.send((job, args, kwargs))
            result, error = connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if error is not None:
            error.details.setdefault("log", self._printed())
            raise error
        return cast("T", result)

    def stop(self) -> None:
        """End the process once its job is done."""
        if self._connection is not None:
            self._connection.close()
        self._join()

    def kill(self) -> None:
        """End the process now and for good; a job under way fails, and so does any later one."""
        self._killed = True
        process = self._process
        if process is not None:
            # The thread that sees it die may have closed it already.
            with contextlib.suppress(ValueError):
                process.kill()

    def _started(self) -> Connection:
        if self._process is not None and self._process.is_alive() and self._connection is not None:
            return self._connection
        if self._killed:
            raise ConversionError("the workshop is closed", closed=True)
        self.stop()
        context = multiprocessing.get_context("spawn")
        self._scratch = Scratch(self._place)
        self._connection, theirs = context.Pipe()
        parent, self._lifeline = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(theirs, parent, str(self._scratch.path), self._threads, self._gpu), daemon=True
        )
        process.start()
        self._process = process
        if self._killed:
            process.kill()
        # Ours alone from now on would keep the pipe open: only without it is the death of the process seen.
        theirs.close()
        parent.close()
        return self._connection

    def _death(self) -> ConversionError:
        process = self._process
        if process is not None:
            process.join()
        code = process.exitcode if process is not None else None
        log = self._printed()
        self._join()
        if self._killed:
            cause = "was ended because its workshop closed"
        elif code is not None and code < 0:
            cause = f"was ended by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += ", as happens when memory runs out"
        else:
            cause = f"ended with exit code {code}"
        last = log.strip().rpartition("\n")[2]
        return ConversionError(
            f"the worker process {cause}" + (f"; its last words: {last}" if last else ""),
            log=log,
            died=True,
            closed=self._killed,
        )

    def _printed(self) -> str:
        if self._scratch is None:
            return ""
        try:
            return (self._scratch.path / LOG).read_text(errors="replace")[-LOG_CHARS:]
        except OSError:
            return ""

    def _join(self) -> None:
        if self._process is not None:
            self._process.join()
            self._process.close()
        for end in (self._connection, self._lifeline):
            if end is not None:
                end.close()
        if self._scratch is not None:
            self._scratch.remove()
        self._process = self._connection = self._lifeline = self._scratch = None


def _serve(connection: Connection, parent: Connection, scratch: str, threads: int, gpu: bool) -> None:
    """The process: jobs come, results go, until the parent closes the pipe or is gone."""
    # Ctrl-C reaches the whole group; the parent decides what becomes of this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent.fileno())
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = None
    os.environ["TF_NUM_INTRAOP_THREADS"] = str(threads)
    os.environ["TF_NUM_INTEROP_THREADS"] = "1"
    # Several of these would fight over the memory of a GPU, which converting does not need.
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    output = os.open(Path(scratch) / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    while True:
        result: Any = None
        error: SplitfleetError | None = None
        try:
            job, args, kwargs = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as trouble:  # unpickling imports the recipe's modules
            error = ConversionError(f"a worker process cannot take the job: {type(trouble).__name__}: {trouble}")
        else:
            os.ftruncate(output, 0)
            try:
                result = job(*args, **kwargs)
            except SplitfleetError as trouble:
                error = trouble
            except Exception as trouble:
                error = _unexpected(trouble)
        connection.send((result, error))


def _unexpected(trouble: Exception) -> SplitfleetError:
    if is_of_the_disk(trouble):
        # TensorFlow adds which of its operations it was.
        told = re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:\w+\]", "", str(trouble))
        return StorageError(f"a file could not be read or written: {told}")
    if isinstance(trouble, MemoryError):
        return ConversionError(f"the memory of this machine does not suffice: {trouble}")
    return ConversionError(f"unexpected {type(trouble).__name__}: {trouble}")
