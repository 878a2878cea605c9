"""The program of a worker process: ``python -m cloud_server.workers.process``, started by :mod:`launch` only.

It lives as long as the control connection, and is killed by the kernel when the server ends in whatever way. Signals
that reach the whole group, such as Ctrl-C, are the server's business.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from threading import Thread

# A tail that runs waits that long at most for a thread that loads another one to hand it the interpreter.
_SWITCH_INTERVAL_S = 0.0005


def main() -> None:
    """Serve until the control connection ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True, help="descriptor of a stream socket")
    parser.add_argument("--lifeline", type=int, required=True, help="descriptor of a pipe that the server holds")
    parser.add_argument("--pulse", required=True, help="ZeroMQ endpoint for heartbeats")
    parser.add_argument("--engine", required=True, help="which engine runs tails, or auto")
    parser.add_argument("--results", type=Path, required=True, help="file that remembers which engine won")
    parser.add_argument("--max-batch", type=int, required=True, help="the largest batch as a rule")
    arguments = parser.parse_args()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from converters.lifeline import end_with

    end_with(arguments.lifeline)
    import zmq

    from cloud_server.workers.pulse import answer

    pulse = answer(zmq.Context(), arguments.pulse)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)

    from cloud_server.engines.choice import EngineChooser
    from cloud_server.workers.host import Host

    if arguments.engine == "tensorflow":
        from cloud_server.engines.tensorflow_engine import import_tensorflow

        # Beside the first load, since it takes seconds.
        Thread(target=import_tensorflow, name="preload", daemon=True).start()
    chooser = EngineChooser(arguments.engine, sorted({1, arguments.max_batch}), arguments.results)
    Host(socket.socket(fileno=arguments.control), load_engine=chooser.load, max_batch=arguments.max_batch).serve()
    del pulse
    # Neither a tail that never returns nor the teardown of its libraries may hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()
