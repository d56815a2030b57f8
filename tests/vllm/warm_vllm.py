"""``vllm serve`` forked from a process that has imported vLLM: a start saves half a minute of CPU.

``python -m tests.vllm.warm_vllm PARENT_PID`` in vLLM's environment. One server is three processes,
each of which imports everything anew where it is started the ordinary way, as the tests of
``kvferry bench vllm`` and of vLLM's own connectors still do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext

from tests.support.process_forks import serve_forks

_PRELOADED = (
    "kvferry.vllm_plugin",
    "nixl._api",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)
_get_context = multiprocessing.get_context


def _forking_context(method: str | None = None) -> BaseContext:
    """On a CPU vLLM spawns its further processes, whatever its environment says."""
    return _get_context("fork" if method == "spawn" else method)


def _take_core() -> None:
    """Run where vLLM tells a worker's OpenMP to, which a new program would read when it starts."""
    if cores := os.environ.get("GOMP_CPU_AFFINITY"):
        os.sched_setaffinity(0, {int(core) for core in cores.split()})


def _serve(arguments: Sequence[str]) -> int:
    from vllm.entrypoints.cli.main import main

    # All of the server's processes have one, which outlives those that end first, and cleans up.
    resource_tracker.ensure_running()
    sys.argv = ["vllm", *arguments]
    main()
    # The ordinary end of a program: vLLM's own work at its exit is done.
    sys.exit()


if __name__ == "__main__":
    multiprocessing.get_context = _forking_context  # type: ignore[assignment]
    os.register_at_fork(after_in_child=_take_core)
    serve_forks(int(sys.argv[1]), _PRELOADED, _serve)
