"""The server's process dies, is flooded, hangs, or never starts: what the supervisor makes of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from raw_zmtp import MORE, RawPeer, frame

from edge_sdk.agent import Agent, AgentSettings
from edge_sdk.channel import Channel
from edge_sdk.errors import PeerUnreachableError
from edge_sdk.protocol import CallDevice, ListDevices
from edge_sdk.store import DeviceStore

PATIENCE_S = 60


@pytest.fixture
def supervised(tmp_path):
    """Run a program whose function ``serve(post)`` is supervised, with pauses that are short; gives the process."""
    started = []

    def start(program, *, cap_bytes=10**10):
        whole = (
            "import json, logging, os, signal, sys, time\n"
            "from pathlib import Path\n"
            "from cloud_server import supervisor\n"
            "from cloud_server.supervisor import Standing, Supervisor\n"
            "from edge_sdk.errors import SplitfleetError\n"
            "logging.basicConfig(format='%(message)s')\n"
            "supervisor.FIRST_PAUSE_S, supervisor.MAX_PAUSE_S, supervisor.LEAVE_WITHIN_S = 0.01, 0.04, 0.01\n"
            f"{program}\n"
            "try:\n"
            f"    code = Supervisor(serve, memory_cap_bytes={cap_bytes}).run()\n"
            "except SplitfleetError as error:\n"
            "    sys.exit(f'error: {error.message}')\n"
            "sys.exit(code)\n"
        )
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", whole],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends_with(process, number=None):
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def test_a_server_that_dies_is_started_again_later_and_later_with_what_it_had(supervised):
    process = supervised(
        "def serve(post):\n"
        "    print(json.dumps(post.standing and vars(post.standing)), flush=True)\n"
        "    seen = 0 if post.standing is None else int(post.standing.endpoint)\n"
        "    if seen == 5:\n"
        "        return\n"
        "    post.tell(Standing(endpoint=str(seen + 1), http='h'))\n"
        "    if seen == 1:\n"
        "        post.tell_allocated()\n"
        "    if seen == 2:\n"
        "        raise SplitfleetError('it broke')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, out, err = ends_with(process)
    assert code == 0
    standings = [json.loads(line) for line in out.splitlines()]
    assert standings[0] is None
    assert [standing["endpoint"] for standing in standings[1:]] == ["1", "2", "3", "4", "5"]
    assert [standing["allocated"] for standing in standings[1:]] == [False, True, False, False, False]
    assert {standing["http"] for standing in standings[1:]} == {"h"}
    killed = "the server was killed by SIGKILL; it is started again in {} s"
    assert err.splitlines() == [
        killed.format(0.01),
        killed.format(0.02),
        "error: it broke",
        "the server ended with exit code 1; it is started again in 0.04 s",
        killed.format(0.04),
        killed.format(0.04),
    ]


@pytest.mark.parametrize("code", [1, 2, 4])
def test_a_start_that_fails_is_final_and_told_once(supervised, code):
    process = supervised(f"def serve(post):\n    print('not like that', file=sys.stderr)\n    sys.exit({code})\n")
    assert ends_with(process) == (code, "", "not like that\n")


def test_a_server_that_is_killed_before_it_serves_is_not_started_again(supervised):
    process = supervised("def serve(post):\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    assert ends_with(process) == (1, "", "error: the server was killed by SIGSEGV before it served\n")


def test_a_cap_that_is_too_low_to_start_is_told(supervised):
    process = supervised("def serve(post):\n    hog = bytearray(10**8)\n    time.sleep(60)\n", cap_bytes=10**8)
    code, _, err = ends_with(process)
    assert code == 1
    assert re.fullmatch(r"error: the server needs more than --memory-cap 100 MB to start: it used \d+ MB\n", err)


def test_memory_above_the_cap_ends_the_server_and_it_comes_back(supervised):
    process = supervised(
        "def serve(post):\n"
        "    if post.standing is not None:\n"
        "        return\n"
        "    post.tell(Standing(endpoint='e'))\n"
        "    hog = []\n"
        "    while True:\n"
        "        hog.append(os.urandom(10**6))\n",
        cap_bytes=10**8,
    )
    code, _, err = ends_with(process)
    assert code == 0
    assert re.fullmatch(
        r"the server used \d+ MB of memory, more than --memory-cap 100 MB, and was killed: a peer may have sent a "
        r"message without end; it is started again in 0.01 s\n",
        err,
    )


STUCK = (
    "def serve(post):\n"
    "    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))\n"
    "    post.tell(Standing(endpoint='e'))\n"
    "    print('stuck', os.getpid(), flush=True)\n"
    "    time.sleep(600)\n"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_also_a_server_that_heeds_none(supervised, number):
    process = supervised(STUCK)
    pid = int(process.stdout.readline().split()[1])
    process.send_signal(signal.SIGTERM)
    # A signal that comes before the first one was heeded would be the same one.
    while "SigPnd:\t0000000000004000" not in (status := _status(pid)) and "ShdPnd:\t0000000000004000" not in status:
        pass
    assert ends_with(process, number) == (128 + number, "", "")
    assert not psutil.pid_exists(pid)


def _status(pid):
    with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
        return file.read()


def test_a_signal_while_it_waits_to_start_again_ends_it(supervised):
    process = supervised(
        "supervisor.FIRST_PAUSE_S = 600\n"
        "def serve(post):\n"
        "    post.tell(Standing(endpoint='e'))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert "started again in 600 s" in process.stderr.readline()
    assert ends_with(process, signal.SIGTERM) == (0, "", "")


def test_a_supervisor_that_is_killed_takes_the_server_with_it(supervised):
    process = supervised(STUCK)
    server = psutil.Process(int(process.stdout.readline().split()[1]))
    process.kill()
    psutil.wait_procs([server], timeout=PATIENCE_S)
    assert not server.is_running()


@pytest.fixture
def device(tmp_path):
    """Run an agent of a device at an endpoint."""
    agents = []

    def start(endpoint):
        settings = AgentSettings(server=endpoint, device_id="cam-1", model_ram_bytes=10**6)
        agent = Agent(settings, DeviceStore.open(tmp_path / "store"))
        thread = threading.Thread(target=agent.run)
        thread.start()
        agents.append((agent, thread))

    yield start
    for agent, thread in agents:
        agent.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def await_device(channel):
    while not any(state["online"] for state in channel.call(ListDevices(), timeout_s=PATIENCE_S).body["devices"]):
        pass


def await_answer(channel):
    while True:
        try:
            return channel.call(ListDevices(), timeout_s=PATIENCE_S)
        except PeerUnreachableError:
            assert not channel.ended


def test_a_killed_server_is_back_where_it_was_for_clients_and_devices(served, device):
    server = served("--bind", "tcp://127.0.0.1:*", "--http", "127.0.0.1:0")
    first = server.server
    device(server.ready["endpoint"])
    with Channel(server.ready["endpoint"]) as channel:
        await_device(channel)
        # A call that the device takes and never answers: it is under way when the server dies.
        asked = CallDevice(device_id="cam-1", device_method="device.run", params={}, stall_timeout_s=PATIENCE_S)
        first.suspend()
        under_way = channel.begin_call(asked, timeout_s=PATIENCE_S)
        first.kill()
        with pytest.raises(PeerUnreachableError):
            under_way.result(PATIENCE_S)
        await_answer(channel)
        # The agent registers by itself: the server knows no device at first.
        await_device(channel)
    again = server.server
    assert again.pid != first.pid
    code, out, err = server.end()
    assert (code, out) == (0, "")
    (line,) = [line for line in err.splitlines() if "killed" in line]
    assert line.endswith(
        "ERROR cloud_server.supervisor: the server was killed by SIGKILL; it is started again in 0.5 s"
    )
    said = [line for line in err.splitlines() if "splitfleet serves at" in line or "figures are at" in line]
    assert len(said) == 4
    assert said[:2] == said[2:]
    assert "Traceback" not in err
    assert not psutil.pid_exists(again.pid)


def test_the_home_is_the_servers_also_while_it_is_dead(served, tmp_path):
    server = served("--bind", "tcp://127.0.0.1:*")
    server.server.kill()
    second = subprocess.run(
        [*server.process.args[:3], "serve", "--home", str(tmp_path / "home"), "--bind", "tcp://127.0.0.1:*"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert second.returncode == 1
    assert second.stderr.startswith(f"error: {tmp_path / 'home'} has a server already, process {server.process.pid}:")
    server.await_line("splitfleet serves at")
    assert server.end()[0] == 0


def test_a_message_that_never_ends_is_stopped_by_the_cap(served):
    server = served("--bind", "tcp://127.0.0.1:*", "--memory-cap", "400MB")
    first = server.server
    endless = frame(bytes(4_000_000), flags=MORE)
    sent = 0
    with Channel(server.ready["endpoint"]) as channel, RawPeer(server.ready["endpoint"]) as peer:
        peer.shake_hands()
        while peer.send(endless):
            sent += len(endless)
            # Not this machine's memory, should the cap not hold.
            assert sent < 4_000_000_000
        await_answer(channel)
    assert server.server.pid != first.pid
    code, _, err = server.end()
    assert code == 0
    assert "more than --memory-cap 400 MB, and was killed: a peer may have sent a message without end" in err
