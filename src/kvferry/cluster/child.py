"""First code of every supervised process: bind its life and its cores, then become the program.

Run as ``python -m kvferry.cluster.child PARENT_PID CORES PROGRAM ARGUMENT…`` where CORES is like
``0,1`` or ``any``. Knows nothing of what the program does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
ANY_CORES = "any"
_THIS_MODULE = "kvferry.cluster.child"


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent ends, however it ends.

    Survives ``exec``. Exits at once if the parent is gone already. Elsewhere than on Linux it only
    does the latter.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one is gone")


def pin(cores: str) -> None:
    """Run on ``cores`` only, where the platform can pin a process."""
    if cores != ANY_CORES and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def command_line(parent_pid: int, cores: Sequence[int], command: Sequence[str]) -> list[str]:
    """Return the command that starts ``command`` (program's path first) as a supervised process."""
    shown = ",".join(map(str, cores)) or ANY_CORES
    return [sys.executable, "-m", _THIS_MODULE, str(parent_pid), shown, *command]


def main(argv: Sequence[str]) -> None:
    """Become the program named after the first two arguments."""
    die_with_parent(int(argv[0]))
    pin(argv[1])
    os.execv(argv[2], list(argv[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
