"""Stands in for ``kvferry engine serve`` and ``kvferry router``: behaves as its arguments say.

``--behave`` is one of: serve (default), die (before it is ready), die-on-usr1 (ready, then dies
with code 7 when told), never-ready, ignore-term (ready, ignores SIGTERM), lie (bad ready file).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def _option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def _write_ready(text: str) -> None:
    path = Path(_option("--ready-file"))
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def _serve(behaviour: str) -> None:
    if behaviour == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "die-on-usr1":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    _write_ready(json.dumps({"url": f"http://127.0.0.1:{os.getpid()}", "pid": os.getpid()}))


def main() -> None:
    behaviour = _option("--behave", "serve")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    sys.stderr.write(f"{sys.argv[1]} here, behaviour {behaviour}, cores {cores}\n")
    sys.stderr.flush()
    if behaviour == "die":
        sys.exit("cannot serve: the reason")
    if behaviour == "lie":
        _write_ready("{")
    elif behaviour != "never-ready":
        _serve(behaviour)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
