"""The log of a server on a stream: as text for people, or a JSON document a line for whatever collects logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """``time``, ``level``, ``logger``, ``message``; of a request's end also ``request``; ``traceback`` where one is."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = getattr(record, "request", None)
        if request is not None:
            document["request"] = request
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)


@contextmanager
def logging_to(stream: TextIO, *, as_json: bool, level: int) -> Iterator[None]:
    """Write what splitfleet logs from ``level`` on, and what libraries log from warnings on, to ``stream``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT))
    logging.getLogger().addHandler(handler)
    for package in ("cloud_server", "edge_sdk"):
        logging.getLogger(package).setLevel(level)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
