"""Too much is asked: memory stays as it is, what is taken in is answered soon, the rest is told when to come."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cloud_server.batches import BatchLimits
from edge_sdk.channel import Channel
from edge_sdk.errors import OverloadedError
from edge_sdk.protocol import LoadTail
from edge_sdk.repository_client import RepositoryClient
from edge_sdk.wire import Message, MessageType, Tensor

PATIENCE_S = 120
PARALLEL = 300
REQUESTS = 2100
MAX_BATCH = 8
# What one device may have waiting.
CAP = BatchLimits().queued_per_device
SHAPE = (64, 1024)

# Some milliseconds of work on features of 64 KiB: the sum of a sample, by way of a few large products.
TAIL = """
import sys
import tensorflow as tf

class Tail(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((None, 64, 1024), tf.int8, name="feature_0")])
    def __call__(self, feature_0):
        x = tf.cast(feature_0, tf.float32)
        y = x
        for _ in range(2):
            y = tf.linalg.matmul(x, tf.linalg.matmul(x, y, transpose_a=True)) * 1e-6
        return {"output_0": tf.reduce_sum(x, (1, 2))[:, None] + 0.0 * tf.reduce_sum(y)}

tf.saved_model.save(Tail(), sys.argv[1])
"""


@pytest.fixture
def busy_bundle(make_bundle, tmp_path):
    folder = tmp_path / "saved"
    subprocess.run([sys.executable, "-c", TAIL, str(folder)], check=True, capture_output=True, timeout=PATIENCE_S)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return make_bundle(tail=files, shape=SHAPE, output_shape=(1,))


@pytest.mark.exhaustive
def test_300_parallel_requests_against_a_cap_of_64(served, busy_bundle):
    server = served("--bind", "tcp://127.0.0.1:*", "--max-batch", str(MAX_BATCH), "--engine", "tensorflow")
    answered, refused, sizes = [], [], []
    lock = threading.Lock()
    with Channel(server.ready["endpoint"]) as channel, ThreadPoolExecutor(PARALLEL) as pool:
        RepositoryClient(channel).put_bundle(busy_bundle)
        channel.call(LoadTail(bundle=busy_bundle.digest), timeout_s=PATIENCE_S)

        def ask(number):
            data = np.full((1, *SHAPE), number % 100, np.int8)
            asked = Message(
                type=MessageType.INFER,
                request_id=0,
                bundle=busy_bundle.digest,
                tensors=(Tensor(name="feature_0", data=data),),
            )
            while True:
                try:
                    result = channel.submit(asked, PATIENCE_S).result()
                except OverloadedError as error:
                    with lock:
                        refused.append(error.details["retry_after_s"])
                    time.sleep(error.details["retry_after_s"])
                    continue
                assert result.arrays()["output_0"][0, 0] == (number % 100) * math.prod(SHAPE)
                with lock:
                    answered.append(result.body)
                    if len(answered) % 300 == 0:
                        sizes.append(server.server.memory_full_info().uss)
                return

        list(pool.map(ask, range(REQUESTS)))
    assert len(answered) == REQUESTS
    # It was too much, and everybody was told when to come again.
    assert len(refused) > PARALLEL - 2 * CAP
    assert min(refused) > 0
    assert max(sizes[2:]) < 1.1 * max(sizes[:2]), sizes
    # Whoever is taken in waits for those that are there, and no longer, however many stand outside.
    batches = math.ceil(CAP / MAX_BATCH) + 2
    longest_s = np.percentile([body["compute_s"] for body in answered], 99)
    assert np.percentile([body["cloud_s"] for body in answered], 99) < batches * longest_s
    code, _, err = server.end()
    assert code == 0
    assert "Traceback" not in err
