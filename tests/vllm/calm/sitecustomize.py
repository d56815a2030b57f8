"""For the tests' vLLM processes only: put this folder on PYTHONPATH and a busy-wait is tamed.

vLLM's processes spin for up to a second after each message between them. Two instances on two cores
are ten times slower for it. No user's host is touched: nothing in the package knows this file.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

_SLEEP_S = 0.0003


class _Spinning(Protocol):
    is_reader: bool


def _calm_broadcast(module: ModuleType) -> None:
    def wait(self: _Spinning, timeout_ms: float | None = None) -> None:
        # Never the wait for a wake-up: one that is lost would cost its whole time.
        if self.is_reader:
            time.sleep(_SLEEP_S)

    module.SpinCondition.wait = wait


_CALM = {"vllm.distributed.device_communicators.shm_broadcast": _calm_broadcast}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds as the others do, and calms a module right after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        calm = _CALM.get(fullname)
        if calm is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_calm(module: ModuleType) -> None:
            execute(module)
            calm(module)

        spec.loader.exec_module = execute_and_calm  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
