"""For vLLM processes of benchmarks and tests: put this folder on PYTHONPATH, and they wait quietly.

vLLM's processes spin for up to a second after each message between them, and NIXL's progress thread
spins always. Two instances on two cores are ten times slower for it. Nothing else is changed, and
nobody's vLLM but those that are started with this folder.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

_SLEEP_S = 0.0003
_PROGRESS_DELAY_US = 2000


class _Spinning(Protocol):
    is_reader: bool


class _AgentConfig(Protocol):
    pthrDelay: int


def _sleep_in_broadcasts(module: ModuleType) -> None:
    def wait(self: _Spinning, timeout_ms: float | None = None) -> None:
        # Never the wait for a wake-up: one that is lost would cost its whole time.
        if self.is_reader:
            time.sleep(_SLEEP_S)

    module.SpinCondition.wait = wait


def _delay_nixl_progress(module: ModuleType) -> None:
    make_agent: Callable[[str, _AgentConfig], object] = module.nixlBind.nixlAgent

    def make_delayed_agent(name: str, config: _AgentConfig) -> object:
        config.pthrDelay = _PROGRESS_DELAY_US
        return make_agent(name, config)

    module.nixlBind.nixlAgent = make_delayed_agent


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "vllm.distributed.device_communicators.shm_broadcast": _sleep_in_broadcasts,
    "nixl_cu12._api": _delay_nixl_progress,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds as the others do, and changes a module right after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = _CHANGES.get(fullname)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
