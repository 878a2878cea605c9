"""Inference for users: a bundle, a server, one sample after another."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from edge_sdk.bundle import Bundle
from edge_sdk.channel import Channel
from edge_sdk.errors import ConfigError
from edge_sdk.head import Head, Sample
from edge_sdk.inference import Inference, InferReply, Timing
from edge_sdk.keys import CurveKeys
from edge_sdk.protocol import MAX_TIMEOUT_S

__all__ = ["InferReply", "SplitClient", "Timing"]


class SplitClient:
    """Runs the head of ``bundle`` here and its tail at ``endpoint``. Thread-safe; a context manager."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        bundle: Path | str,
        timeout_s: float = 10.0,
        runtime: str | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        """Load the head from the folder ``bundle`` and connect to the server.

        ``endpoint``: such as ``tcp://127.0.0.1:5555``; a bundle that runs wholly on the device needs none.
        ``timeout_s``: for connecting, and for each inference from the features' departure on; a day at most.
        ``runtime``: name of the TFLite runtime, else the first one that is usable. ``keys``: ours and the server's,
        where it has CURVE on, such as ``CurveKeys.load("cam-1.key", "server.pub")``.

        Raises :class:`BundleError`, :class:`RuntimeUnavailableError`, :class:`ConfigError`,
        :class:`PeerUnreachableError`, :class:`UntrustedServerError`, :class:`UnauthorizedError`.
        """
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} (a day), got {timeout_s}")
        self.bundle = Bundle.open(bundle)
        head = Head(self.bundle, runtime=runtime)
        self._channel: Channel | None = None
        if endpoint is not None and self.bundle.manifest.has_tail:
            self._channel = Channel(endpoint, connect_timeout_s=timeout_s, keys=keys)
        self._inference = Inference(head, self._channel, timeout_s=timeout_s)

    def infer(self, sample: Sample) -> InferReply:
        """Infer one sample: an array for a model of one input, else arrays by input name; batch axis of 1 optional.

        Raises :class:`InvalidInputError` for a sample that the model does not take, :class:`DeadlineExceededError`,
        :class:`PeerUnreachableError`, or the error that the server answered with.
        """
        return self._inference.infer(sample)

    def close(self) -> None:
        """Disconnect; what is under way ends with :class:`PeerUnreachableError`."""
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
