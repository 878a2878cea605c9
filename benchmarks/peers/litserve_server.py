"""LitServe: uvicorn in one process, the tail in another. Raw bytes both ways.

    python litserve_server.py --port N --max-batch N --delay-ms D --tail FOLDER

``max_batch_size`` and ``batch_timeout`` are those of the run. LitServe parses a body as JSON or as a form unless
``decode_request`` asks for something else; here FastAPI hands over the body as it is. Results go back to uvicorn
through ZeroMQ (``fast_queue``), which LitServe offers as the faster of its two ways.
"""

# No postponed annotations: LitServe gives those of decode_request and encode_response to FastAPI as they are.
import argparse
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request, Response
from litserve import LitAPI, LitServer
from saved_model import Array, SavedModel


async def _body(request: Request) -> bytes:
    return await request.body()


class Tail(LitAPI):
    """The tail of ``folder``, loaded by :meth:`setup` in the process that runs it."""

    def __init__(self, folder: Path, max_batch: int, delay_s: float) -> None:
        super().__init__(max_batch_size=max_batch, batch_timeout=delay_s)
        self._folder = folder

    def setup(self, device: str) -> None:  # noqa: ARG002 (LitServe's)
        self._model = SavedModel(self._folder, max_batch=self.max_batch_size)

    def decode_request(self, request: Annotated[bytes, Depends(_body)]) -> Array:
        return self._model.feature(request)

    def batch(self, inputs: list[Array]) -> list[Array]:
        return inputs

    def predict(self, x: Array | list[Array]) -> Array:
        return self._model.run(x if isinstance(x, list) else [x])

    def unbatch(self, output: Array) -> list[Array]:
        return list(output)

    def encode_response(self, output: Array) -> Response:
        return Response(content=output.tobytes(), media_type="application/octet-stream")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tail", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--delay-ms", type=float, required=True)
    options = parser.parse_args()
    server = LitServer(
        Tail(options.tail, options.max_batch, options.delay_ms / 1000),
        accelerator="cpu",
        workers_per_device=1,
        fast_queue=True,
        timeout=60,
    )
    server.run(
        host="127.0.0.1",
        port=options.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
