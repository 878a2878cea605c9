"""What the tests of the lab share: an echo server, a way to wait, a look at processes and cgroups."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloud_server.lab.limits import FOLDER, _mounts

PATIENCE_S = 20.0


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], object]], None]:
    """Wait until something holds, and fail when it does not come to hold in reasonable time."""

    def wait(holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it did not come to hold"
            time.sleep(0.01)

    return wait


@pytest.fixture
def echo() -> Iterator[str]:
    """The endpoint of a server that sends back what it gets, on any number of connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    accepting.join(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a connection was left open"


@pytest.fixture(scope="session")
def groups_of_labs() -> Callable[[], list[Path]]:
    """Folders of all memory cgroups that labs of this process, or dead ones, have on this machine."""

    def find() -> list[Path]:
        found = []
        for mount, _ in _mounts(Path("/proc/self/mounts").read_text()):
            for folder in (mount / FOLDER).glob("lab-*"):
                pid = int(folder.name.split("-")[1])
                if pid == os.getpid() or not Path(f"/proc/{pid}").exists():
                    found.append(folder)
        return found

    return find


@pytest.fixture
def no_group_is_left(groups_of_labs: Callable[[], list[Path]]) -> Iterator[None]:
    """Check after the test that it has left no memory cgroup."""
    yield
    assert groups_of_labs() == []


@pytest.fixture(scope="session")
def is_running() -> Callable[[int], bool]:
    """Whether a process is there and no zombie."""

    def look(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return look
