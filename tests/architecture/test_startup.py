"""Help and the router start without torch, and help with few modules."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MAX_MODULES = 500
"""The standard library's included. Counted, since the seconds that they cost are the machine's."""
HEAVY = {"torch", "transformers", "numpy", "nixl", "zmq", "matplotlib"}

_SHOW_MODULES = """
import json, sys
from kvferry.cli.main import run
code = run(sys.argv[1:])
names = sorted({name.partition(".")[0] for name in sys.modules})
print("MODULES " + json.dumps([code, names, len(sys.modules)]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["up", "--help"],
        ["demo", "--help"],
        ["bench", "--help"],
        ["bench", "handoff", "--help"],
        ["bench", "turns", "--help"],
        ["engine", "serve", "--help"],
        ["engine", "simulate", "--help"],
        ["router", "--help"],
        ["doctor", "--help"],
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _SHOW_MODULES, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    code, modules, num_modules = json.loads(shown.stdout.rpartition("MODULES ")[2])
    assert code == 0
    assert HEAVY.isdisjoint(modules)
    assert num_modules < MAX_MODULES


def test_a_router_imports_nothing_heavy() -> None:
    program = (
        "import sys, kvferry.cli.router, kvferry.router.service, uvloop\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert shown.stdout == "[]\n"
