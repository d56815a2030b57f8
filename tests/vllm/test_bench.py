"""``kvferry bench vllm`` on real vLLM: a table at the end, and nothing left of what it started."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.serving import environment_folder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_DEADLINE_S = 400.0
_MARK = "KVFERRY_TEST_RUN"


class _Run:
    """One run of the command, and what bears its mark on this machine."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        self._shared_before = set(Path("/dev/shm").iterdir())
        self.errors_path = folder / "errors"
        with self.errors_path.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.cli.main", "bench", "vllm",
                 "--vllm", str(environment_folder()), "--at-once", "1", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **dict([self._mark.split("=")])},
                start_new_session=True,
            )  # fmt: skip

    @property
    def errors(self) -> str:
        return self.errors_path.read_text(errors="replace")

    def left(self) -> list[str]:
        """Return its processes, and what is new in shared memory."""
        shared = [str(path) for path in set(Path("/dev/shm").iterdir()) - self._shared_before]
        return [*map(str, self._processes()), *shared]

    def kill(self) -> None:
        for pid in self._processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def runs() -> Iterator[list[_Run]]:
    started: list[_Run] = []
    yield started
    for run in started:
        run.kill()


def test_a_tiny_run_ends_with_a_table_and_leaves_nothing(tmp_path: Path, runs: list[_Run]) -> None:
    record_path = tmp_path / "record.json"
    arms = ["--arms", "nixl-pull,ferry-pull", "--lengths", "300", "--repeats", "1"]
    run = _Run(tmp_path, *arms, "--max-tokens", "4", "--json", str(record_path))
    runs.append(run)
    shown, _ = run.process.communicate(timeout=_DEADLINE_S)
    assert run.process.returncode == 0, run.errors
    assert run.left() == []
    table = shown.decode()
    assert "ferry-pull / nixl-pull" in table
    record = json.loads(record_path.read_text())
    assert {sample["arm"] for sample in record["samples"]} == {"nixl-pull", "ferry-pull"}
    assert all(sample["num_moved_tokens"] >= 256 for sample in record["samples"])


def test_ctrl_c_leaves_nothing(tmp_path: Path, runs: list[_Run]) -> None:
    run = _Run(tmp_path, "--arms", "ferry-push", "--lengths", "300", "--repeats", "500")
    runs.append(run)
    end_s = time.monotonic() + _DEADLINE_S
    while "ferry serves" not in run.errors:
        assert run.process.poll() is None, run.errors
        assert time.monotonic() < end_s, run.errors
        time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=_DEADLINE_S)
    assert run.process.returncode == 130
    assert run.left() == []
