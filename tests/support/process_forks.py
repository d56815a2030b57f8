"""Real ``kvferry`` processes that start in a moment: forked from one that has imported everything.

Tests that kill processes start many; importing the tensor library each time would take most of
their time. A forked process runs the command line as an ordinary one does. Owns the process that is
forked from and the pids of its children; knows no option of the command line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PRELOADED = (
    "kvferry.cli.engine",
    "kvferry.cli.router",
    "kvferry.engine.model",
    "kvferry.engine.runner",
    "kvferry.router.service",
    "kvferry.server.run",
    "transformers.models.llama.modeling_llama",
)
_START_TIMEOUT_S = 300.0
"""Of what imports everything, on busy cores."""
_ROOT = Path(__file__).parents[2]
"""Where `tests` can be imported from."""


class ForkedProcess:
    """One child, known by a descriptor so that its pid is never another process's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.own_pid = pid
        """As the process itself sees it."""
        self._pidfd = os.pidfd_open(pid)

    @property
    def is_alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process has ended within ``timeout_s``."""
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        if not self.wait(_START_TIMEOUT_S):
            raise TimeoutError(f"process {self.pid} does not die")


class ProcessForks:
    """The process that is forked from. Its children die with it, and it with this one.

    ``program`` is one that calls ``serve_forks``.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", __name__),
    ) -> None:
        self._process = subprocess.Popen(
            [*program, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
        )

    def start(
        self,
        arguments: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        """Run the program with ``arguments``, its output appended to ``log_path``.

        ``environment`` is added to that of the process that is forked from.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise ValueError("the process to fork from has no pipes")
        order = {"arguments": list(arguments), "log": str(log_path)}
        line = json.dumps(order | {"environment": dict(environment or {})})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _START_TIMEOUT_S)[0]:
            raise TimeoutError("the process to fork from does not answer")
        return ForkedProcess(int(self._process.stdout.readline()))

    def close(self) -> None:
        """End all: children get SIGKILL from the kernel."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def serve_forks(
    parent_pid: int, modules: Sequence[str], run: Callable[[Sequence[str]], int]
) -> None:
    """Import ``modules``; then have a child ``run`` each order from standard input."""
    from kvferry.cluster.child import die_with_parent

    die_with_parent(parent_pid)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    # Ended children vanish by themselves.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    own_pid = os.getpid()
    for line in iter(sys.stdin.buffer.readline, b""):
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            die_with_parent(own_pid)
            _take_place(order["log"], order["environment"])
            _end(run(order["arguments"]))
        os.write(1, f"{pid}\n".encode())


def _take_place(log_path: str, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(arguments: Sequence[str]) -> int:
    from kvferry.cli.main import run

    return run(arguments)


if __name__ == "__main__":
    serve_forks(int(sys.argv[1]), _PRELOADED, _run)
