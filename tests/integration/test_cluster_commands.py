"""``kvferry up`` and ``kvferry demo`` as a user runs them, with the bundled model."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_KVFERRY = (sys.executable, "-m", "kvferry.cli.main")
_BOUND_S = 240
_IDLE_S = 10.0
_MAX_IDLE_SHARE = 0.02

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(2 * _BOUND_S),
]


@dataclass(frozen=True, slots=True)
class _Up:
    process: subprocess.Popen[str]
    urls: dict[str, str]
    curl: list[str]
    children: dict[str, int]

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(_BOUND_S)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[words.index("--instance-id") + 1] if "--instance-id" in words else "router"


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


@pytest.fixture(scope="module", autouse=True)
def _run_folders_go_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs of processes that died are kept, in the folder for temporary files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("run")))
        yield


@contextmanager
def _up(*options: str) -> Iterator[_Up]:
    with subprocess.Popen(
        [*_KVFERRY, "up", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            shown = []
            for line in process.stdout:
                shown.append(line)
                if "curl" in line:
                    break
            else:
                assert process.stderr is not None
                pytest.fail("".join(shown) + process.stderr.read())
            urls = dict(re.findall(r"^(\S+) +(http://\S+)$", "".join(shown), re.MULTILINE))
            yield _Up(
                process,
                urls,
                shlex.split(shown[-1]),
                {_name(pid): pid for pid in _children(process.pid)},
            )
        finally:
            process.kill()


@pytest.fixture(scope="module")
def up() -> Iterator[_Up]:
    with _up() as running:
        yield running


def test_up_names_what_it_started_and_all_of_it_serves(up: _Up) -> None:
    assert set(up.urls) == set(up.children) == {"prefill-0", "decode-0", "router"}
    for url in up.urls.values():
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            assert answer.status == 200


def test_the_command_to_try_is_answered(up: _Up) -> None:
    url = next(word for word in up.curl if word.startswith("http"))
    body = up.curl[up.curl.index("-d") + 1].encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_BOUND_S) as answer:
        events = answer.read().decode().strip().split("\n\n")
    assert len(events) > 2
    assert events[-1] == "data: [DONE]"


def test_idle_processes_cost_next_to_nothing(up: _Up) -> None:
    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before_s = {name: cpu_s(pid) for name, pid in up.children.items()}
    time.sleep(_IDLE_S)
    shares = {name: (cpu_s(pid) - before_s[name]) / _IDLE_S for name, pid in up.children.items()}
    assert max(shares.values()) < _MAX_IDLE_SHARE, shares


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_up_stops_everything_when_told(how: signal.Signals, code: int) -> None:
    with _up("--transport", "shm") as running:
        assert running.end(how) == code
        assert not any(map(_runs, running.children.values()))


def test_up_fails_naming_the_process_that_died() -> None:
    with _up("--transport", "shm") as running:
        os.kill(running.children["decode-0"], signal.SIGKILL)
        assert running.process.wait(_BOUND_S) == 1
        assert running.process.stderr is not None
        said = running.process.stderr.read()
        assert "decode-0 was killed by SIGKILL" in said
        assert "Traceback" not in said
        assert not any(map(_runs, running.children.values()))


def test_a_model_that_is_not_there_is_named() -> None:
    ended = subprocess.run(
        [*_KVFERRY, "up", "--model", "/nowhere/model"],
        capture_output=True,
        text=True,
        timeout=_BOUND_S,
        check=False,
    )
    assert ended.returncode == 1
    assert "/nowhere/model" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_demo_ends_well() -> None:
    ended = subprocess.run(
        [*_KVFERRY, "demo"], capture_output=True, text=True, timeout=_BOUND_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "demo: ok"
    assert ended.stdout.count(" yes ") == 6
    assert ended.stdout.count(" pull ") == ended.stdout.count(" push ") == 3


def test_ctrl_c_before_all_is_ready_ends_it_quietly() -> None:
    with subprocess.Popen(
        [*_KVFERRY, "up"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "starting" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(_BOUND_S) == 130
        assert "Traceback" not in said
