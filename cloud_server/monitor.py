"""HTTP beside the wire, for whoever watches over the server: ``/livez``, ``/readyz``, ``/metrics``.

Threads of its own; what is true is asked of the server, which neither waits for it nor knows of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Protocol, Self

from cloud_server.metrics import CONTENT_TYPE
from edge_sdk.errors import ConfigError

_LOG = logging.getLogger(__name__)
_ADDRESS = re.compile(r"(?P<host>[^:/\s]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
# Of a peer that connects and says nothing.
_PATIENCE_S = 5.0


class Watched(Protocol):
    """What is asked of a server; may be asked from any thread."""

    def ailment(self) -> str | None:
        """Why it is not alive, if so."""

    def hindrance(self) -> str | None:
        """Why it does not serve all that it should, if so."""

    def exposition(self) -> bytes:
        """Its figures, in Prometheus' text form."""


class Monitor:
    """Answers at ``address``, ``HOST:PORT``, from entering until leaving. Port 0 picks one; :attr:`address` tells.

    Raises :class:`ConfigError` when it cannot listen there.
    """

    def __init__(self, address: str, watched: Watched) -> None:
        match = _ADDRESS.fullmatch(address)
        if match is None or int(match["port"]) >= 2**16:
            raise ConfigError(f"--http {address!r} is no address: expected HOST:PORT such as 127.0.0.1:9090")
        host = match["host"].strip("[]")

        class Handler(_Handler):
            pages = _pages(watched)

        try:
            self._server = _Server((host, int(match["port"])), Handler)
        except OSError as error:
            raise ConfigError(f"--http {address}: cannot listen there ({error.strerror}); name another one") from None
        self.address = f"{match['host']}:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, name="http", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


Page = Callable[[], tuple[HTTPStatus, str, bytes]]


def _pages(watched: Watched) -> dict[str, Page]:
    def state(reason: str | None) -> tuple[HTTPStatus, str, bytes]:
        status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "text/plain; charset=utf-8", f"{reason or 'ok'}\n".encode()

    return {
        "/livez": lambda: state(watched.ailment()),
        "/readyz": lambda: state(watched.ailment() or watched.hindrance()),
        "/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE, watched.exposition()),
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Leaving does not wait for a peer that does not read.
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        _LOG.debug("a request over HTTP failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    pages: dict[str, Page]

    def do_GET(self) -> None:
        page = self.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"there are {', '.join(self.pages)}")
            return
        status, content_type, body = page()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        _LOG.debug(format, *args)
