"""mosec: its HTTP server in Rust, and one process for the tail. Raw bytes both ways.

    MOSEC_TAIL=FOLDER python mosec_server.py --port N --max-batch N --delay-ms D --tail FOLDER

``max_batch_size`` and ``max_wait_time`` are those of the run. mosec waits whole milliseconds, at least one: a worker
that has a request waits as long for the batch to be full.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy.typing as npt
from mosec import Server, Worker
from saved_model import Array, SavedModel


class Tail(Worker):
    """Decodes, runs and encodes; all of it in one process, since one more stage would only copy once more."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self._model = SavedModel(Path(os.environ["BENCHMARK_TAIL"]), max_batch=self.max_batch_size)

    def deserialize(self, data: bytes) -> Array:
        return self._model.feature(data)

    def forward(self, data: Array | list[Array]) -> npt.ArrayLike:
        if self.max_batch_size == 1:
            return self._model.run([data])[0]
        return list(self._model.run(data))

    def serialize(self, data: Array) -> bytes:
        return data.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tail", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--delay-ms", type=float, required=True)
    options = parser.parse_args()
    # The processes of workers are made anew: they inherit the environment, and nothing else.
    os.environ["BENCHMARK_TAIL"] = options.tail
    # mosec reads its own options from there.
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(options.port), "--timeout", "60000"]
    server = Server()
    server.append_worker(Tail, num=1, max_batch_size=options.max_batch, max_wait_time=max(1, round(options.delay_ms)))
    server.run()


if __name__ == "__main__":
    main()
