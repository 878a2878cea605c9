"""What a channel says of something that listens and is no server, with keys and without."""

import contextlib
import socket
import threading

import pytest

from edge_sdk.channel import Channel
from edge_sdk.errors import PeerUnreachableError, UntrustedServerError
from edge_sdk.keys import CurveKeys, make_key_pair


@pytest.fixture
def start_stranger():
    """Something that listens, says what the test wants to everybody, and hangs up."""
    listeners = []

    def serve(listener, said):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(said)
                    connection.shutdown(socket.SHUT_WR)

    def start(said):
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=serve, args=(listener, said))
        thread.start()
        listeners.append((listener, thread))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener, thread in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_stranger_speaks_another_protocol(start_stranger):
    endpoint = start_stranger(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" + b"x" * 64)
    with pytest.raises(PeerUnreachableError, match="does not shake hands"):
        Channel(endpoint, connect_timeout_s=1.0)


def test_a_server_with_keys_of_its_own_is_no_stranger(start_stranger):
    public, secret = make_key_pair()
    keys = CurveKeys(public=public, secret=secret, server=make_key_pair()[0])
    with pytest.raises(UntrustedServerError):
        Channel(start_stranger(b""), keys=keys, connect_timeout_s=0.5)
