"""A user's own key: made once, by whoever comes first, and known to nobody else."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ConfigError
from kvferry.protocol.keys import (
    CLUSTER_KEY_VARIABLE,
    FOLDER_VARIABLE,
    KeyChoice,
    OwnKey,
    UserKeyFile,
    key_id,
    load_cluster_key,
    load_user_key,
    user_key_path,
)

_CLUSTER_KEY = "c" * 32


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {FOLDER_VARIABLE: str(tmp_path / "state")}


def _load(environment: dict[str, str]) -> OwnKey:
    key = load_user_key(environment)
    assert key is not None
    return key


def test_the_first_start_makes_it_and_later_ones_find_it(environment: dict[str, str]) -> None:
    first, second = _load(environment), _load(environment)
    assert first == second
    path = user_key_path(environment)
    assert first.user_file == UserKeyFile(str(path), os.geteuid(), key_id(first.secret))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobodys_umask_opens_it(environment: dict[str, str], mask: int) -> None:
    before = os.umask(mask)
    try:
        _load(environment)
    finally:
        os.umask(before)
    path = user_key_path(environment)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_two_users_have_two(environment: dict[str, str], tmp_path: Path) -> None:
    ours = _load(environment)
    theirs = _load({FOLDER_VARIABLE: str(tmp_path / "other")})
    assert ours.secret != theirs.secret
    assert key_id(ours.secret) != key_id(theirs.secret)


def test_the_file_serves_as_a_cluster_key_file(environment: dict[str, str]) -> None:
    """So an older release can be given it, and a router of another user a copy of it."""
    key = _load(environment)
    assert load_cluster_key(user_key_path(environment), {}) == key.secret


def test_it_is_not_shown(environment: dict[str, str]) -> None:
    key = _load(environment)
    shown = f"{key!r} {key} {key.user_file} {key.user_file!r}"
    assert key.secret.decode() not in shown
    assert str(user_key_path(environment)) in shown


def test_all_who_start_at_once_get_the_same(tmp_path: Path) -> None:
    num_starters = 8
    with ThreadPoolExecutor(num_starters) as pool:
        for number in range(20):
            environment = {FOLDER_VARIABLE: str(tmp_path / str(number))}
            barrier = threading.Barrier(num_starters)

            def start(barrier: threading.Barrier, environment: dict[str, str]) -> bytes:
                barrier.wait(10)
                return _load(environment).secret

            starts = [pool.submit(start, barrier, environment) for _ in range(num_starters)]
            assert len({started.result() for started in starts}) == 1
            assert len(list(user_key_path(environment).parent.iterdir())) == 1


@pytest.mark.parametrize("call", ["mkdir", "listdir", "open", "link", "unlink"])
def test_whoever_comes_first_wins_at_any_moment(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Another starts and ends between any two steps of ours."""
    rival: list[bytes] = []
    real: Callable[..., Any] = getattr(os, call)

    def first_a_rival(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        monkeypatch.setattr(os, call, real)
        rival.append(_load(environment).secret)
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, first_a_rival)
    assert [_load(environment).secret] == rival
    assert len(list(user_key_path(environment).parent.iterdir())) == 1


def test_who_only_looks_makes_none(environment: dict[str, str], tmp_path: Path) -> None:
    assert load_user_key(environment, makes=False) is None
    assert list(tmp_path.iterdir()) == []
    made = _load(environment)
    assert load_user_key(environment, makes=False) == made


def test_it_lies_in_the_home_where_nothing_else_is_said(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), FOLDER_VARIABLE: "relative/is/not/valid"}
    assert user_key_path(home) == tmp_path / ".local/state/kvferry/user-key"
    _load(home)


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "here"}])
def test_without_a_home_it_is_said_what_to_do(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"HOME are not set; give a cluster key .* or set XDG_"):
        load_user_key(environment)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/kvferry/user-key cannot be made.* cluster key"):
        load_user_key({FOLDER_VARIABLE: str(tmp_path / "file")})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_key_that_others_can_read_is_refused(environment: dict[str, str], mode: int) -> None:
    secret = _load(environment).secret
    user_key_path(environment).chmod(mode)
    with pytest.raises(ConfigError, match=f"user-key has mode {mode:04o}") as caught:
        load_user_key(environment)
    assert secret.decode() not in str(caught.value)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(
    environment: dict[str, str], mode: int
) -> None:
    _load(environment)
    user_key_path(environment).parent.chmod(mode)
    with pytest.raises(ConfigError, match=f"kvferry has mode {mode:04o}"):
        load_user_key(environment)


def test_a_link_to_elsewhere_is_not_followed(environment: dict[str, str], tmp_path: Path) -> None:
    path, elsewhere = user_key_path(environment), tmp_path / "elsewhere"
    _load(environment)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="cannot be made or read"):
        load_user_key(environment)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be made or read"):
        load_user_key(environment)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_is_a_link_is_not_followed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder, elsewhere = user_key_path(environment).parent, tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="cannot be made or read"):
        load_user_key(environment)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("is_folder", [False, True])
def test_another_users_is_refused(environment: dict[str, str], is_folder: bool) -> None:
    _load(environment)
    path = user_key_path(environment)
    os.chown(path.parent if is_folder else path, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to uid 65534, and this process is of uid 0"):
        load_user_key(environment)


def test_what_is_no_file_is_refused(environment: dict[str, str]) -> None:
    path = user_key_path(environment)
    path.parent.mkdir(mode=0o700, parents=True)
    os.mkfifo(path, 0o600)  # Reading it would wait for ever.
    with pytest.raises(ConfigError, match="no file"):
        load_user_key(environment)


def test_a_cut_off_key_is_refused(environment: dict[str, str]) -> None:
    _load(environment)
    user_key_path(environment).write_text("short\n")
    with pytest.raises(ConfigError, match="32 to 4096 bytes"):
        load_user_key(environment)


def test_a_cluster_key_goes_first(environment: dict[str, str], tmp_path: Path) -> None:
    assert KeyChoice().find(environment, is_local=True) == _load(environment)
    environment[CLUSTER_KEY_VARIABLE] = _CLUSTER_KEY
    assert KeyChoice().find(environment, is_local=True) == OwnKey(_CLUSTER_KEY.encode())
    file = tmp_path / "cluster"
    file.write_text("f" * 32)
    del environment[CLUSTER_KEY_VARIABLE]
    assert KeyChoice(cluster_key_file=file).find(environment, is_local=True) == OwnKey(b"f" * 32)


def test_beyond_loopback_a_users_key_does_not_count(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert KeyChoice().find(environment, is_local=False) is None
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_done_without(environment: dict[str, str], tmp_path: Path) -> None:
    assert KeyChoice(no_user_key=True).find(environment, is_local=True) is None
    assert list(tmp_path.iterdir()) == []
    environment[CLUSTER_KEY_VARIABLE] = _CLUSTER_KEY
    with pytest.raises(ConfigError, match="--no-user-key"):
        KeyChoice(no_user_key=True).find(environment, is_local=True)
