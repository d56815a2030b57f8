"""The key that all of a deployment prove to have: the cluster key, or on loopback the user's own.

A user's key is made at the first start, in a file that only this user can read: whoever has it may
be any process of this user, and no other user's. So it counts on loopback addresses only. The
caller passes the environment in.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvferry.errors import ConfigError
from kvferry.options import option

CLUSTER_KEY_VARIABLE = "KVFERRY_CLUSTER_KEY"
MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096
FOLDER_VARIABLE = "XDG_STATE_HOME"
NO_USER_KEY_OPTION = "--no-user-key"
_FOLDER, _FILE = "kvferry", "user-key"
_NEW_KEY_BYTES = 32
_REMEDY = (
    "give a cluster key (--cluster-key-file or KVFERRY_CLUSTER_KEY), or set "
    f"{FOLDER_VARIABLE} to a folder of this user's that can be written to"
)


class UserKeyFile(msgspec.Struct, frozen=True):
    """Where a user's key is, for others to be told: the key cannot be had from this."""

    path: str
    uid: int
    key_id: str
    """Equal for equal keys."""

    def __str__(self) -> str:
        return f"the key of uid {self.uid} in {self.path}"

    @property
    def remedy(self) -> str:
        """What whoever has another key, or none, can do."""
        return (
            f"give --cluster-key-file {self.path}, the key of uid {self.uid}; as another user give "
            "it a copy of that file, or have one cluster key on all sides"
        )


@dataclass(frozen=True, slots=True)
class OwnKey:
    """The key that this process proves to have, and asks for."""

    secret: bytes = field(repr=False)
    user_file: UserKeyFile | None = None
    """Where it is from, if it is this user's own; None: a cluster key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChoice:
    """Which key a process is to have, as its user says."""

    cluster_key_file: Path | None = option(
        None,
        "Secret shared by all instances and routers, needed beyond loopback; KVFERRY_CLUSTER_KEY "
        "does as well.",
        default_text="on loopback the user's own key",
    )
    no_user_key: bool = option(
        False,
        "Have no key on loopback: any user of this host may then do what peers may. For peers and "
        "routers of releases before the user's key.",
    )

    def find(
        self, environment: Mapping[str, str], *, is_local: bool, makes: bool = True
    ) -> OwnKey | None:
        """Return the cluster key if one is given, else, where it counts (``is_local``), the user's.

        ``makes``: as in ``load_user_key``. Raises ``ConfigError``.
        """
        cluster_key = load_cluster_key(self.cluster_key_file, environment)
        if cluster_key is not None:
            if self.no_user_key:
                raise ConfigError(
                    f"a cluster key and {NO_USER_KEY_OPTION} are given: give one of them"
                )
            return OwnKey(cluster_key)
        if not is_local or self.no_user_key:
            return None
        return load_user_key(environment, makes=makes)


def load_cluster_key(path: Path | None, environment: Mapping[str, str]) -> bytes | None:
    """Return the cluster key from the file ``path`` or else ``KVFERRY_CLUSTER_KEY``; None if unset.

    One line end after the key is not part of it. Raises ``ConfigError``, which never shows the
    key, if both are given, the file cannot be read, or the key has a wrong length.
    """
    value = environment.get(CLUSTER_KEY_VARIABLE)
    if path is not None and value is not None:
        raise ConfigError(f"give the cluster key as a file or as {CLUSTER_KEY_VARIABLE}, not both")
    if path is not None:
        return checked_key(_read_key(path), str(path))
    if value is not None:
        return checked_key(value.encode("utf-8", "surrogateescape"), CLUSTER_KEY_VARIABLE)
    return None


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_KEY_BYTES + 3)
    except OSError as error:
        raise ConfigError(f"the cluster key cannot be read: {error}") from error


def checked_key(raw: bytes, source: str) -> bytes:
    """Return the key without its line end. Raises ``ConfigError`` if its length is wrong."""
    key = raw.removesuffix(b"\n").removesuffix(b"\r")
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(
            f"the cluster key in {source} must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes; "
            "make one with: openssl rand -hex 32"
        )
    return key


def user_key_path(environment: Mapping[str, str]) -> Path:
    """Return where the user's key is, or is to be. Raises ``ConfigError`` if no folder is named."""
    state, home = environment.get(FOLDER_VARIABLE, ""), environment.get("HOME", "")
    if not Path(state).is_absolute():
        if not Path(home).is_absolute():
            raise ConfigError(
                f"there is no folder for this user's key: {FOLDER_VARIABLE} and HOME are not set; "
                f"{_REMEDY}"
            )
        return Path(home, ".local", "state", _FOLDER, _FILE)
    return Path(state, _FOLDER, _FILE)


def load_user_key(environment: Mapping[str, str], *, makes: bool = True) -> OwnKey | None:
    """Return this user's key. If there is none it is made, or else None.

    All that make it at once get the same one. Raises ``ConfigError`` if it cannot be made or read,
    or others could have read or written it.
    """
    path = user_key_path(environment)
    try:
        if makes:
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        with _opened_folder(path.parent) as folder:
            if makes and not _exists(folder):
                _make(folder)
            secret = _read(path, folder)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not makes:
            return None
        raise ConfigError(
            f"this user's key {path} cannot be made or read: {error}; {_REMEDY}"
        ) from (error)
    return OwnKey(secret, UserKeyFile(str(path), os.geteuid(), key_id(secret)))


def key_id(secret: bytes) -> str:
    """Return what tells two users' keys apart. Not for a cluster key, which might be guessed."""
    return hashlib.blake2b(secret, digest_size=8, person=b"kvferry-key-id").hexdigest()


@contextlib.contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of the folder: what is checked stays what is used."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_own(path, os.fstat(folder), forbidden=0o022)
        yield folder
    finally:
        os.close(folder)


def _exists(folder: int) -> bool:
    return _FILE in os.listdir(folder)


def _read(path: Path, folder: int) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(_FILE, flags, dir_fd=folder), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"this user's key {path} is no file: remove it")
        _require_own(path, status, forbidden=0o077)
        return checked_key(file.read(MAX_KEY_BYTES + 3), str(path))


def _make(folder: int) -> None:
    """Write a key under another name and give it its own if there is none by then."""
    partial = f".{_FILE}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(partial, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(secrets.token_hex(_NEW_KEY_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, _FILE, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=folder)


def _require_own(path: Path, status: os.stat_result, *, forbidden: int) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to uid {status.st_uid}, and this process is of uid {os.geteuid()}: "
            f"{_REMEDY}"
        )
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"{path} has mode {mode:04o}: other users may know or replace the key; remove it, and "
            "the next start makes another, which everything of this user has to be started anew for"
        )


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address; names other than ``localhost`` are not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local_address(address: str) -> bool:
    """Whether ``address``, a URL or an endpoint like ``tcp://host:port``, is on loopback."""
    try:
        return is_loopback(urlsplit(address).hostname or "")
    except ValueError:
        return False
