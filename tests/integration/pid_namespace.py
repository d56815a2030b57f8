"""Real ``kvferry`` processes in a pid namespace of their own, as containers have one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.process_forks import ForkedProcess, ProcessForks

AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
IN_PID_NAMESPACE = ("unshare", *AS_ROOT, "--pid", "--fork", "--kill-child", "--mount-proc")
_RUN = "import sys; from kvferry.cli.main import run; sys.exit(run(sys.argv[1:]))"
_START_TIMEOUT_S = 20.0


class NamespacedProcess(ForkedProcess):
    """One process, the first of its namespace."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.own_pid = 1


class NamespaceForks(ProcessForks):
    """Starts each process in a new namespace; none is forked from another."""

    def __init__(self) -> None:
        self._launchers: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        arguments: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        with log_path.open("ab") as log:
            launcher = subprocess.Popen(
                [*IN_PID_NAMESPACE, sys.executable, "-c", _RUN, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            )
        self._launchers.append(launcher)
        return NamespacedProcess(only_child(launcher.pid))

    def close(self) -> None:
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()


def only_child(pid: int) -> int:
    """Return the pid of the process that ``pid`` starts, as soon as it has."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ValueError):
            (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(child)
        time.sleep(0.005)
    raise AssertionError(f"process {pid} starts nothing")
