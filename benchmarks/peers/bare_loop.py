"""A bare ROUTER loop: takes what waits, up to the largest batch, and runs it. No checks, deadlines, bounds or threads.

    python bare_loop.py --port N --max-batch N [--delay-ms D] [--tail FOLDER | --echo-bytes N]

It never waits for a batch to fill up (``--delay-ms`` is taken, and ignored, since all servers here take it). Without a
tail it answers each request with as many zeros: what a message costs that is answered at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import zmq
from saved_model import SavedModel


def echo(socket: zmq.Socket[bytes], size_bytes: int) -> None:
    answer = bytes(size_bytes)
    while True:
        peer, _ = socket.recv_multipart()
        socket.send_multipart([peer, answer], copy=False)


def serve(socket: zmq.Socket[bytes], model: SavedModel, max_batch: int) -> None:
    while True:
        waiting = [socket.recv_multipart()]
        while len(waiting) < max_batch:
            try:
                waiting.append(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        outputs = model.run([model.feature(body) for _, body in waiting])
        for (peer, _), output in zip(waiting, outputs, strict=True):
            socket.send_multipart([peer, output], copy=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tail", type=Path)
    parser.add_argument("--echo-bytes", type=int)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-batch", type=int, default=1)
    parser.add_argument("--delay-ms", type=float, default=0)
    options = parser.parse_args()
    model = None if options.tail is None else SavedModel(options.tail, max_batch=options.max_batch)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"tcp://127.0.0.1:{options.port}")
    if model is None:
        echo(socket, options.echo_bytes)
    else:
        serve(socket, model, options.max_batch)


if __name__ == "__main__":
    main()
