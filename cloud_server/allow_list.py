"""The keys that a server allows: one small file for each, in a folder of its home.

A file is asked for at each question, so what ``splitfleet keys`` does in another process holds at once: to revoke a key
is to delete its file. What a key may do is decided in :mod:`cloud_server.guard`.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import NamedTemporaryFile

from edge_sdk.errors import ConfigError

_LOG = logging.getLogger(__name__)
_MIN_PREFIX_CHARS = 8
SHOWN_CHARS = 16


class Role(StrEnum):
    """Whom a key belongs to. A device's key goes with one device id, an operator's is for allocators and uploads."""

    DEVICE = "device"
    OPERATOR = "operator"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds an allowed key. ``name`` is the device id where the role is ``device``; ``public`` is Z85."""

    name: str
    role: Role
    public: str

    @property
    def device_id(self) -> str:
        """The device that it is; empty where it is none."""
        return self.name if self.role is Role.DEVICE else ""

    @property
    def fingerprint(self) -> str:
        """The beginning of the key in hexadecimal, as it is shown and taken by 'revoke'."""
        return _hex(self.public)[:SHOWN_CHARS]


class AllowList:
    """The allowed keys below ``folder``, which need not exist: no key is allowed then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Keys that were asked for after a handshake; strangers never get that far.
        self._paths: dict[str, str] = {}
        self._read: dict[str, tuple[tuple[int, int], Holder]] = {}

    def holder(self, public: str) -> Holder | None:
        """Who holds the key now; ``None``: it is not allowed. Costs one ``stat`` where nothing has changed."""
        path = self._paths.get(public)
        if path is None:
            path = str(self._path(public))
        try:
            status = os.stat(path)  # noqa: PTH116 -- on the path of every message
            version = (status.st_mtime_ns, status.st_ino)
            known = self._read.get(public)
            if known is not None and known[0] == version:
                return known[1]
            holder = _load(Path(path))
        except FileNotFoundError:
            self._read.pop(public, None)
            self._paths.pop(public, None)
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            # In doubt it is not allowed.
            _LOG.error("%s: the allowed key cannot be read: %s", path, error)
            return None
        if holder.public != public:
            _LOG.error("%s: the file is named after another key than it holds", path)
            return None
        self._paths[public], self._read[public] = path, (version, holder)
        return holder

    def all(self) -> list[Holder]:
        """All allowed keys, by role and name."""
        found = []
        for path in sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ():
            try:
                found.append(_load(path))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}: the allowed key cannot be read: {error}") from None
        return sorted(found, key=lambda holder: (holder.role, holder.name, holder.public))

    def allow(self, holder: Holder) -> bool:
        """Allow a key; false when it was allowed already. Raises :class:`ConfigError` when it is somebody else's."""
        known = self.holder(holder.public)
        if known is not None and known != holder:
            raise ConfigError(
                f"the key {holder.fingerprint} is allowed for the {known.role} {known.name!r} already: "
                "revoke it there first"
            )
        if known is not None:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            document = {"name": holder.name, "role": holder.role.value, "public": holder.public}
            with NamedTemporaryFile("w", dir=self._folder, suffix=".part", delete=False) as file:
                json.dump(document, file)
            # Whoever reads it finds it complete.
            Path(file.name).replace(self._path(holder.public))
        except OSError as error:
            raise ConfigError(f"{self._folder}: the key cannot be allowed ({error.strerror})") from None
        return True

    def revoke(self, role: Role, target: str) -> list[Holder]:
        """Revoke all keys of the name ``target``, or the one whose fingerprint begins so; returns what was revoked.

        Raises :class:`ConfigError` when there is none, or a fingerprint is of several.
        """
        mine = [holder for holder in self.all() if holder.role is role]
        revoked = [holder for holder in mine if holder.name == target]
        if not revoked and len(target) >= _MIN_PREFIX_CHARS:
            revoked = [holder for holder in mine if _hex(holder.public).startswith(target.lower())]
            if len(revoked) > 1:
                raise ConfigError(f"{len(revoked)} keys begin with {target!r}: give more digits")
        if not revoked:
            raise ConfigError(
                f"no {role} key is allowed for {target!r}; 'splitfleet keys {role} list' shows those that are"
            )
        for holder in revoked:
            try:
                self._path(holder.public).unlink(missing_ok=True)
            except OSError as error:
                raise ConfigError(f"{self._folder}: the key cannot be revoked ({error.strerror})") from None
        return revoked

    def _path(self, public: str) -> Path:
        return self._folder / f"{_hex(public)}.json"


def _hex(public: str) -> str:
    from zmq.utils import z85

    # Z85 has characters that file names cannot have.
    return z85.decode(public).hex()


def _load(path: Path) -> Holder:
    document = json.loads(path.read_text())
    return Holder(name=str(document["name"]), role=Role(document["role"]), public=str(document["public"]))
