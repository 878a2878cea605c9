"""Key files: who one is to a server with CURVE on, and who that server is.

A key pair lives in two files in ZeroMQ's certificate format, which ``zmq.auth`` and czmq read too: ``NAME.key`` with
the secret key, readable by its owner alone, and ``NAME.pub``, which may be shown to everybody. Keys are Z85 text of 40
characters. Which keys a server allows is its own business (see ``splitfleet keys``).
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from edge_sdk.errors import ConfigError

SECRET_SUFFIX = ".key"
PUBLIC_SUFFIX = ".pub"
_MAX_FILE_BYTES = 8192
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class KeyFile:
    """What a key file says. ``secret`` is ``None`` in a public one; ``name`` and ``role`` may be empty."""

    name: str
    role: str
    public: str
    secret: str | None = field(repr=False, default=None)


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """What a client needs for CURVE: its own key pair and the public key of the server. ``name`` is the key's."""

    public: str
    secret: str = field(repr=False)
    server: str
    name: str = ""

    @classmethod
    def load(cls, key: Path | str, server_key: Path | str) -> Self:
        """Read the own secret key from ``key`` and the server's public key from ``server_key``.

        Raises :class:`ConfigError` for a file that cannot be read, is not what is asked for, or is open to others.
        """
        own, secret = read_secret(Path(key))
        return cls(public=own.public, secret=secret, server=read_public(Path(server_key)).public, name=own.name)

    @classmethod
    def load_both(cls, key: Path | None, server_key: Path | None) -> Self | None:
        """The same for the options ``--key`` and ``--server-key``: ``None`` without both, an error with one alone."""
        if key is None and server_key is None:
            return None
        if key is None or server_key is None:
            given, missing = ("--server-key", "--key") if key is None else ("--key", "--server-key")
            raise ConfigError(
                f"{given} is given without {missing}: CURVE takes the own secret key (--key FILE.key) and the server's "
                "public key (--server-key server.pub)"
            )
        return cls.load(key, server_key)


def make_key_pair() -> tuple[str, str]:
    """A new public and secret key."""
    import zmq

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def check_key_name(name: str) -> str:
    """``name``, if key files can be called so. Raises :class:`ConfigError`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a key: expected 1 to 64 letters, digits, '.', '_' or '-', "
            "and a letter or digit in front"
        )
    return name


def write_key_pair(folder: Path, name: str, *, role: str) -> KeyFile:
    """Make a key pair and write ``NAME.key`` and ``NAME.pub`` into ``folder``; nothing is ever overwritten.

    Raises :class:`ConfigError`.
    """
    secret_path, public_path = (folder / (check_key_name(name) + end) for end in (SECRET_SUFFIX, PUBLIC_SUFFIX))
    for path in (secret_path, public_path):
        if os.path.lexists(path):
            raise ConfigError(f"{path} exists, and a key is never overwritten: take another name, or move it away")
    public, secret = make_key_pair()
    pair = KeyFile(name=name, role=role, public=public, secret=secret)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(secret_path, pair, 0o600)
        _write(public_path, KeyFile(name=name, role=role, public=public), 0o644)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: no key can be written there ({error.strerror})") from None
    return pair


def read_secret(path: Path) -> tuple[KeyFile, str]:
    """The key file at ``path`` and its secret key. Raises :class:`ConfigError`."""
    found, mode = _read(path)
    if found.secret is None:
        raise ConfigError(f"{path} holds a public key, but the secret one is needed: name the {SECRET_SUFFIX} file")
    if mode & 0o077:
        raise ConfigError(
            f"{path} holds a secret key and is open to others (mode {stat.S_IMODE(mode):04o}); run 'chmod 600 {path}'"
        )
    return found, found.secret


def read_public(path: Path) -> KeyFile:
    """The key file at ``path``, which must hold no secret. Raises :class:`ConfigError`."""
    found, _ = _read(path)
    if found.secret is not None:
        raise ConfigError(
            f"{path} holds a secret key, which stays where it was made: name the {PUBLIC_SUFFIX} file beside it"
        )
    return found


def _write(path: Path, key: KeyFile, mode: int) -> None:
    head = "#   splitfleet public key: may be shown to everybody\n"
    secret = ""
    if key.secret is not None:
        head = "#   splitfleet SECRET key: stays on the machine that uses it\n"
        secret = f'    secret-key = "{key.secret}"\n'
    text = f'{head}metadata\n    name = {key.name}\n    role = {key.role}\ncurve\n    public-key = "{key.public}"\n'
    # With its mode from the first instant on, and never over another file.
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text + secret)


def _read(path: Path) -> tuple[KeyFile, int]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{path}: the key cannot be read ({error.strerror})") from None
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith("#"):
            values[name.strip()] = value.strip().strip("\"'")
    public, secret = values.get("public-key", ""), values.get("secret-key")
    if not _KEY.fullmatch(public) or (secret is not None and not _KEY.fullmatch(secret)):
        # Not a word of what was read instead: it may be a secret.
        raise ConfigError(f"{path} is no key file: expected what 'splitfleet keys' writes, with a line public-key")
    return KeyFile(name=values.get("name", ""), role=values.get("role", ""), public=public, secret=secret), mode
