"""Workers as the processes that they are: killed, frozen, busy for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
import zmq

from cloud_server.loop import Loop
from cloud_server.workers.crew import CrewLimits
from cloud_server.workers.launch import Launcher
from cloud_server.workers.pulse import Pulse, PulseLimits
from cloud_server.workers.worker import Backoff
from edge_sdk.errors import TailFailedError
from edge_sdk.protocol import LoadTail

PATIENCE_S = 60
# A process that answers heartbeats and never lets go of the interpreter: this search takes longer than anybody lives.
HOGGING = """
import re, sys, zmq
from cloud_server.workers.pulse import answer
pulse = answer(zmq.Context(), sys.argv[1])
print("up", flush=True)
re.match("(a+)+$", "a" * 100 + "b")
"""


def worker_of_this_process():
    (worker,) = [
        child for child in psutil.Process().children() if "cloud_server.workers.process" in " ".join(child.cmdline())
    ]
    return worker


def test_a_worker_that_is_killed_fails_what_it_was_at_and_is_replaced(
    start, make_bundle, saved_models, feature, tmp_path
):
    launcher = partial(Launcher, engine="tensorflow", results=tmp_path / "engines.json")
    running = start(launcher=launcher, crew=CrewLimits(backoff=Backoff(first_s=0.01, most_s=0.01)))
    endless = make_bundle(tail=saved_models["endless"])
    running.repository.add_bundle(endless)
    peer = running.peer()
    assert peer.call(LoadTail(bundle=endless.digest)).body["engine"] == "tensorflow"
    first = worker_of_this_process()
    (state,) = running.tails.workers()
    assert (state.up, state.tails, state.restarts) == (True, 1, 0)
    assert state.rss_bytes > 10**8

    lost = peer.begin_infer(endless.digest, feature(1))
    while not running.in_loop(lambda: any(served.batcher.running for served in running.tails._served.values())):
        pass
    first.kill()
    with pytest.raises(
        TailFailedError, match=r"was ended by SIGKILL, as happens when memory runs out \(.*; it was runn"
    ):
        peer.end_of(lost)
    # It waits for the next one, which loads the tail again.
    assert np.all(peer.infer(endless.digest, feature(0)).tensors[0].data == 1.0)
    second = worker_of_this_process()
    assert second.pid != first.pid

    running.stop()
    running.join()
    assert running.ended
    assert not second.is_running()


@pytest.mark.exhaustive
def test_fifty_loads_and_unloads_leave_no_memory_behind(start, make_bundle, tmp_path):
    weights = 5_000_000
    code = f"""
import sys
import tensorflow as tf

class Tail(tf.Module):
    def __init__(self):
        self.weights = tf.Variable(tf.random.normal(({weights // 6}, 6)))

    @tf.function(input_signature=[tf.TensorSpec((None, 2, 3), tf.int8, name="feature_0")])
    def __call__(self, feature_0):
        rows = tf.reshape(tf.cast(feature_0, tf.float32), (-1, 6))
        return {{"output_0": rows + tf.reduce_sum(self.weights, axis=0)}}

tf.saved_model.save(Tail(), sys.argv[1])
"""
    folder = tmp_path / "tail"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, timeout=PATIENCE_S)
    bundle = make_bundle(
        tail={str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    )
    running = start(launcher=partial(Launcher, engine="tensorflow", results=tmp_path / "engines.json"))
    running.repository.add_bundle(bundle)
    (worker,) = running.tails._crew
    loaded, unloaded = [], []
    for _ in range(50):
        running.tails.load(bundle.digest)
        loaded.append(running.tails.workers()[0].rss_bytes)
        running.tails.unload(bundle.digest)
        # What is unloaded gives its memory back a moment later.
        while running.in_loop(lambda: running.tails._leaving or worker.unloading):
            time.sleep(0.01)
        unloaded.append(running.tails.workers()[0].rss_bytes)
    # The first few loads bring what stays: code, and pools of threads and memory. Weights that stayed would be more
    # than all of it.
    assert 50 * 4 * weights > loaded[4]
    assert unloaded[-1] < 1.05 * unloaded[4]
    assert loaded[-1] < 1.05 * loaded[4]


@pytest.fixture
def pulse():
    """Watch the heartbeats of a process; gives the endpoint for it and what was told."""
    loop, context = Loop(), zmq.Context()
    pulses = []

    def begin(endpoint, **limits):
        silent = []
        pulses.append(Pulse(loop, context, endpoint, PulseLimits(**limits), on_silence=lambda: silent.append(True)))
        return loop, silent

    yield begin
    for each in pulses:
        each.close()
    context.destroy(0)
    loop.close()


def test_heartbeats_tell_a_frozen_process_from_one_that_never_lets_go_of_the_interpreter(pulse, tmp_path):
    endpoint = f"ipc://{tmp_path}/pulse"
    loop, silent = pulse(endpoint, interval_s=0.1, silence_s=1.0, again_s=0.5)
    process = subprocess.Popen([sys.executable, "-c", HOGGING, endpoint], stdout=subprocess.PIPE)
    try:
        assert process.stdout.read(2) == b"up"
        enough = loop.clock() + 2.5
        while loop.clock() < enough:
            loop.wait(enough)
        assert not silent
        process.send_signal(signal.SIGSTOP)
        while not silent:
            loop.wait(loop.clock() + PATIENCE_S)
        assert silent == [True]
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_never_comes_is_given_up(pulse, tmp_path):
    loop, silent = pulse(f"ipc://{tmp_path}/pulse", start_s=0.01)
    while not silent:
        loop.wait(loop.clock() + PATIENCE_S)
