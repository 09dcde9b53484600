"""CURVE keys: what proves a stack's processes to each other, and encrypts what goes between them over TCP.

A folder made by `kvtide keys` holds two pairs. Who binds a socket (scheduler, storage) needs `server.key` and
`peer.pub`; who only connects (worker, gateway, command line) needs `peer.key` and `server.pub`.
"""

import os
from pathlib import Path
from typing import NamedTuple

import zmq

from shared.errors import ConfigError

Z85_BYTES = 40  # a key in ZeroMQ's text form (RFC 32), 32 bytes in binary
SERVER, PEER = "server", "peer"


class Keys(NamedTuple):
    """The keys that a folder holds, each in Z85; None for those that it hasn't."""

    folder: Path
    server_secret: bytes | None
    server_public: bytes | None
    peer_secret: bytes | None
    peer_public: bytes | None

    def need(self, name: str) -> bytes:
        """A key by its field's name. Raises ConfigError when the folder hasn't it."""
        key: bytes | None = getattr(self, name)
        if key is None:
            role, _, kind = name.partition("_")
            file = f"{role}.{'key' if kind == 'secret' else 'pub'}"
            raise ConfigError(f"{self.folder} has no {file}, which a socket of this process needs: copy it there")
        return key


def make_keys(folder: Path) -> None:
    """Make both pairs in a new or empty folder. Raises ConfigError when it holds anything: keys are never replaced."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} isn't empty: name a new folder, and let run.keys_folder point to it")
        for role in (SERVER, PEER):
            public, secret = zmq.curve_keypair()
            _write(folder / f"{role}.key", secret, 0o600)
            _write(folder / f"{role}.pub", public, 0o644)
    except OSError as error:
        raise ConfigError(f"can't make keys in {folder}: {error.strerror}; name a folder that can be written") from None


def read_keys(folder: Path) -> Keys:
    """Read what a folder holds. Raises ConfigError for a folder without keys, a damaged key, or a secret that others
    can read.
    """
    keys = Keys(
        folder,
        _read(folder / f"{SERVER}.key", secret=True),
        _read(folder / f"{SERVER}.pub"),
        _read(folder / f"{PEER}.key", secret=True),
        _read(folder / f"{PEER}.pub"),
    )
    if keys.server_secret is None and keys.peer_secret is None:
        raise ConfigError(f"run.keys_folder {folder} holds neither server.key nor peer.key: run `kvtide keys {folder}`")
    return keys


def _write(path: Path, key: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")


def _read(path: Path, secret: bool = False) -> bytes | None:
    try:
        if secret and path.stat().st_mode & 0o077:
            raise ConfigError(f"others can read {path}, which is a secret: chmod 600 {path}")
        key = path.read_bytes().strip()
        if len(key) != Z85_BYTES:
            raise ValueError(f"{len(key)} characters instead of {Z85_BYTES}")
        zmq.curve_public(key)  # a key is 32 bytes, so a public one passes too
    except FileNotFoundError:
        return None
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"can't read the key {path}: {error}; copy it again, or make new ones") from None
    return key
