"""Which process on which host a peer is, and proof that it is dead.

Knows nothing of transports. A pid alone is no name: it is reused, and another pid namespace has its
own. So an identity carries the host's boot id, the pid namespace and the process's start time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

_DEAD_STATES = frozenset("ZXx")
_STATE_FIELD = 0
_START_FIELD = 19


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Names one process for as long as its host runs."""

    boot_id: Annotated[str, Meta(min_length=1, max_length=64)]
    pid_namespace: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Inode number of the namespace."""
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    start_ticks: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Start time in clock ticks after the host's boot."""

    def is_on_host_of(self, other: ProcessIdentity) -> bool:
        """Whether one kernel runs both, if in two containers."""
        return self.boot_id == other.boot_id

    def is_beside(self, other: ProcessIdentity) -> bool:
        """Whether both are on one host and see each other's pids."""
        return self.is_on_host_of(other) and self.pid_namespace == other.pid_namespace


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    return ProcessIdentity(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
        pid=os.getpid(),
        start_ticks=int(_stat_fields(Path("/proc/self/stat"))[_START_FIELD]),
    )


def is_proven_dead(process: ProcessIdentity) -> bool:
    """Whether no thread of ``process``, which must be beside the caller, can run any more.

    False where it cannot be told. A leader may be a zombie while another of its threads is still
    inside a system call that copies memory, so every thread is looked at.
    """
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    folder = Path(f"/proc/{process.pid}")
    try:
        if int(_stat_fields(folder / "stat")[_START_FIELD]) != process.start_ticks:
            return True
        return all(_is_dead_thread(task) for task in (folder / "task").iterdir())
    except OSError:
        return _has_vanished(process.pid)


def _is_dead_thread(task: Path) -> bool:
    try:
        return _stat_fields(task / "stat")[_STATE_FIELD] in _DEAD_STATES
    except (FileNotFoundError, ProcessLookupError):
        return True


def _has_vanished(pid: int) -> bool:
    """Tell a process that is gone from one that /proc hides."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _stat_fields(path: Path) -> list[str]:
    """Return the fields after the command's name, which may itself contain blanks and brackets."""
    return path.read_text().rpartition(")")[2].split()
