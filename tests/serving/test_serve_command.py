"""``splitfleet serve`` as a process: it starts, says where it is, serves, and ends with nothing left behind."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from urllib.request import urlopen

import numpy as np
import psutil
import pytest

from edge_sdk.channel import Channel
from edge_sdk.errors import BundleError, GoingAwayError, PeerUnreachableError, UnknownBundleError
from edge_sdk.protocol import Heartbeat, ListDevices, LoadTail
from edge_sdk.repository_client import RepositoryClient
from edge_sdk.wire import Message, MessageType, Tensor

PATIENCE_S = 60
COMMAND = [sys.executable, "-c", "from cloud_server.cli import main; main()"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_and_ends_cleanly(served, registration, number):
    server = served()
    assert server.ready["pid"] == server.process.pid
    assert server.ready["endpoint"].startswith("tcp://127.0.0.1:")
    assert server.ready["endpoint"] in server.said[-1]
    with Channel(server.ready["endpoint"]) as channel:
        channel.call(registration(), timeout_s=PATIENCE_S)
        assert len(channel.call(ListDevices(), timeout_s=PATIENCE_S).body["devices"]) == 1
    code, out, err = server.end(number)
    assert code == 0
    assert out == ""
    assert err.splitlines() == [server.said[-1].rstrip(), "splitfleet has stopped"]
    assert not psutil.pid_exists(server.process.pid)
    with pytest.raises(PeerUnreachableError):
        Channel(server.ready["endpoint"], connect_timeout_s=0.2)


def test_a_tail_is_served_and_blobs_survive_a_restart(served, make_bundle, saved_models, registration):
    bundle = make_bundle(tail=saved_models["good"])
    features = np.arange(6, dtype=np.int8).reshape(1, 2, 3)
    server = served()
    with Channel(server.ready["endpoint"]) as channel:
        channel.call(registration(), timeout_s=PATIENCE_S)
        RepositoryClient(channel).put_bundle(bundle)
        assert channel.call(LoadTail(bundle=bundle.digest), timeout_s=PATIENCE_S).body["engine"] == "tensorflow"
        asked = Message(
            type=MessageType.INFER,
            request_id=0,
            bundle=bundle.digest,
            tensors=(Tensor(name="feature_0", data=features),),
        )
        result = channel.submit(asked, PATIENCE_S).result()
        np.testing.assert_allclose(result.arrays()["output_0"], 0.1 * (features.reshape(1, 6) - 3.0), rtol=1e-5)
    code, _, err = server.end()
    assert code == 0
    assert "Traceback" not in err
    # The blobs stay; tails are loaded for accepted allocations or on demand; devices have to register again.
    again = served()
    with Channel(again.ready["endpoint"]) as channel:
        assert channel.call(Heartbeat(device_id="cam-1", progress=0), timeout_s=PATIENCE_S).body == {"known": False}
        assert RepositoryClient(channel).put_bundle(bundle) == 0
    assert again.end()[0] == 0


def test_the_engine_is_the_one_that_is_asked_for_or_the_bundle_is_refused(
    served, make_bundle, saved_models, tail_tflites
):
    both = make_bundle("both", tail=saved_models["good"], tail_tflite=tail_tflites["good"])
    lacks = make_bundle("lacks", tail=saved_models["good"], tail_tflite_reason="no kernel for this")
    server = served("--bind", "tcp://127.0.0.1:*", "--engine", "litert")
    with Channel(server.ready["endpoint"]) as channel:
        for bundle in (both, lacks):
            RepositoryClient(channel).put_bundle(bundle)
        loaded = channel.call(LoadTail(bundle=both.digest), timeout_s=PATIENCE_S).body
        assert loaded["engine"] == "litert"
        with pytest.raises(
            BundleError, match=r"cannot be served with --engine litert: .*: no kernel for this; serve it"
        ):
            channel.call(LoadTail(bundle=lacks.digest), timeout_s=PATIENCE_S)
        modules = [psutil.Process(server.ready["pid"]), *psutil.Process(server.ready["pid"]).children(recursive=True)]
        assert not any("tensorflow" in file.path for each in modules for file in each.memory_maps())
    code, _, err = server.end()
    assert code == 0
    assert f"bundle {both.digest[:12]} runs on litert in worker 1: {loaded['engine_reason']}" in err


def test_more_peers_than_files_that_a_shell_allows(served):
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        server = served()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    _, _, port = server.ready["endpoint"].rpartition(":")
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S))
        # Sooner than strangers are turned away, which is after 30 s.
        with Channel(server.ready["endpoint"], connect_timeout_s=PATIENCE_S / 4) as channel:
            assert channel.call(ListDevices(), timeout_s=PATIENCE_S).body["devices"] == []


def test_figures_and_state_over_http_and_a_log_in_json(served, registration):
    server = served("--bind", "tcp://127.0.0.1:*", "--http", "127.0.0.1:0", "--log-format", "json")
    assert server.ready["http"].startswith("127.0.0.1:")
    with Channel(server.ready["endpoint"]) as channel:
        channel.call(registration(profile="jetson-nano"), timeout_s=PATIENCE_S)
        with pytest.raises(UnknownBundleError):
            channel.submit(Message(type=MessageType.INFER, request_id=0, bundle="f" * 64), PATIENCE_S).result()
    for page in ("livez", "readyz"):
        with urlopen(f"http://{server.ready['http']}/{page}", timeout=PATIENCE_S) as answer:
            assert answer.read() == b"ok\n"
    with urlopen(f"http://{server.ready['http']}/metrics", timeout=PATIENCE_S) as answer:
        assert b'method="device.register",outcome="OK"' in answer.read()
    code, out, err = server.end()
    assert (code, out) == (0, "")
    entries = [json.loads(line) for line in err.splitlines()]
    assert entries[0]["message"].startswith("figures are at http://")
    (failed,) = [entry["request"] for entry in entries if "request" in entry]
    assert (failed["method"], failed["outcome"]) == ("INFER", "UNKNOWN_BUNDLE")


def test_an_address_for_http_that_cannot_be_had_is_told_in_one_line(served, tmp_path):
    first = served("--bind", "tcp://127.0.0.1:*", "--http", "127.0.0.1:0")
    second = subprocess.run(
        [
            *COMMAND,
            "serve",
            "--home",
            str(tmp_path / "x"),
            "--bind",
            "tcp://127.0.0.1:*",
            "--http",
            first.ready["http"],
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert second.returncode == 1
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"error: --http {first.ready['http']}: cannot listen there")
    assert first.end()[0] == 0


def workers_of(server):
    """Its worker processes."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in below if "cloud_server.workers.process" in process.cmdline()]


@pytest.fixture
def busy(served, make_bundle, saved_models):
    """A server with a request under way that does not end, and the future of that request."""
    channels = []
    endless = make_bundle(tail=saved_models["endless"])

    def start(*options):
        server = served("--bind", "tcp://127.0.0.1:*", *options)
        channels.append(Channel(server.ready["endpoint"]))
        RepositoryClient(channels[0]).put_bundle(endless)
        channels[0].call(LoadTail(bundle=endless.digest), timeout_s=PATIENCE_S)
        ones = Tensor(name="feature_0", data=np.ones((1, 2, 3), np.int8))
        asked = Message(type=MessageType.INFER, request_id=0, bundle=endless.digest, tensors=(ones,))
        answer = channels[0].submit(asked, PATIENCE_S)
        # It is under way once the server has answered what came after it.
        channels[0].call(ListDevices(), timeout_s=PATIENCE_S)
        server.workers = workers_of(server)
        assert len(server.workers) == 1
        return server, answer

    yield start
    for channel in channels:
        channel.close()


def test_what_does_not_end_within_the_grace_period_is_told_and_the_exit_code_is_0(busy):
    server, answer = busy("--grace", "0.2")
    code, _, err = server.end()
    assert code == 0
    with pytest.raises(GoingAwayError):
        answer.result(PATIENCE_S)
    assert err.endswith("splitfleet has stopped\n")
    assert not any(worker.is_running() for worker in server.workers)


def test_a_server_that_is_killed_leaves_no_worker(busy):
    server, answer = busy()
    assert server.workers
    server.process.kill()
    _, alive = psutil.wait_procs(server.workers, timeout=PATIENCE_S)
    assert not alive
    with pytest.raises(PeerUnreachableError):
        answer.result(PATIENCE_S)


def says_that_it_goes(channel):
    try:
        channel.call(ListDevices(), timeout_s=PATIENCE_S)
    except GoingAwayError:
        return True
    return False


def test_a_second_signal_ends_it_at_once_and_leaves_no_process(busy):
    server, answer = busy("--grace", "3600", "--allocate-task", "fashion-mnist")
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert any("spawn_main" in " ".join(process.cmdline()) for process in processes)
    server.process.send_signal(signal.SIGTERM)
    # It says so at once, and goes on for what is under way.
    with Channel(server.ready["endpoint"]) as channel:
        while not says_that_it_goes(channel):
            pass
    assert server.end(signal.SIGINT)[0] == 128 + signal.SIGINT
    with pytest.raises(PeerUnreachableError):
        answer.result(PATIENCE_S)
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


def test_a_port_in_use_is_told_in_one_line(served, tmp_path):
    first = served()
    second = subprocess.run(
        [*COMMAND, "serve", "--home", str(tmp_path / "other"), "--bind", first.ready["endpoint"]],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert second.returncode == 1
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"error: {first.ready['endpoint']} is in use")
    assert first.end()[0] == 0


@pytest.mark.parametrize(
    "endpoint", ["udp://127.0.0.1:5555", "127.0.0.1:5555", "tcp://127.0.0.1:99999", "tcp://nowhere"]
)
def test_an_endpoint_that_is_none_is_a_wrong_option(tmp_path, endpoint):
    done = subprocess.run(
        [*COMMAND, "serve", "--home", str(tmp_path / "home"), "--bind", endpoint],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert f"Invalid value for '--bind': '{endpoint}' is no endpoint to bind to" in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "127.example.org"])
def test_off_loopback_it_refuses_without_keys(tmp_path, host):
    done = subprocess.run(
        [*COMMAND, "serve", "--home", str(tmp_path), "--bind", f"tcp://{host}:5599"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: tcp://{host}:5599 is open to other machines, and without CURVE")
    assert "'splitfleet keys server new'" in line
    assert "--key" in line
    assert "tcp://127.0.0.1:5599" in line


def test_a_ready_file_that_cannot_be_written_is_told(tmp_path):
    done = subprocess.run(
        [*COMMAND, "serve", "--home", str(tmp_path), "--bind", "tcp://127.0.0.1:*", "--ready-file", "/no/such/place"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "error: --ready-file /no/such/place: cannot be written (No such file or directory)\n"


def test_help_loads_nothing_heavy():
    program = (
        "import sys, click\n"
        "from cloud_server.cli import cli\n"
        "cli.main(['serve', '--help'], standalone_mode=False)\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert "--allocate-task" in done.stdout
    assert not {"zmq", "numpy", "tensorflow", "sqlalchemy", "alembic", "rich", "pydantic"} & set(done.stderr.split())


def test_an_allocation_beside_it_waits_for_devices_and_ends_with_the_server(served):
    server = served("--bind", "tcp://127.0.0.1:*", "--allocate-task", "fashion-mnist", "--max-rounds", "1")
    assert server.process.stderr.readline() == "waiting for a device to register\n"
    (allocator,) = [child for child in server.server.children() if "spawn_main" in " ".join(child.cmdline())]
    code, out, err = server.end()
    assert (code, out) == (0, "")
    assert "Traceback" not in err
    assert not allocator.is_running()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--allocate-task", "no-such-task"), 1, "error: there is no task 'no-such-task'; the tasks are: "),
        (("--min-accuracy", "0.9", "--seed", "3"), 2, "no allocation that takes --min-accuracy, --seed"),
    ],
)
def test_an_allocation_that_cannot_be_made_is_told_before_anybody_is_served(tmp_path, options, code, says):
    done = subprocess.run(
        [*COMMAND, "serve", "--home", str(tmp_path / "home"), "--bind", "tcp://127.0.0.1:*", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.count(says) == 1
    assert "serves at" not in done.stderr
