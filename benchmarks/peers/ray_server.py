"""Ray Serve: one replica behind the HTTP proxy of one node. Raw bytes both ways.

    python ray_server.py --port N --max-batch N --delay-ms D --tail FOLDER

``@serve.batch`` takes ``max_batch_size`` and ``batch_wait_timeout_s`` of the run. The replica gets as many CPUs as this
process may run on, since Ray else limits the threads of what it starts. No dashboard, no usage report, no access log.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path
from threading import Event

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve
from ray.serve.schema import LoggingConfig
from saved_model import Array, SavedModel
from starlette.requests import Request
from starlette.responses import Response

IN_FLIGHT = 1024


@serve.deployment
class Tail:
    """The tail of ``folder``."""

    def __init__(self, folder: Path, max_batch: int, delay_s: float) -> None:
        self._model = SavedModel(folder, max_batch=max_batch)
        self._run.set_max_batch_size(max_batch)
        self._run.set_batch_wait_timeout_s(delay_s)

    @serve.batch
    async def _run(self, features: list[Array]) -> list[Array]:
        return list(self._model.run(features))

    async def __call__(self, request: Request) -> Response:
        output = await self._run(self._model.feature(await request.body()))
        return Response(output.tobytes(), media_type="application/octet-stream")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tail", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--delay-ms", type=float, required=True)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    here = str(Path(__file__).parent)
    ray.init(
        num_cpus=cores + 2,
        include_dashboard=False,
        configure_logging=True,
        logging_level=logging.WARNING,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": here}},
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": options.port},
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    tail = Tail.options(num_replicas=1, max_ongoing_requests=IN_FLIGHT, ray_actor_options={"num_cpus": cores}).bind(
        options.tail, options.max_batch, options.delay_ms / 1000
    )
    serve.run(tail, route_prefix="/predict")
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
