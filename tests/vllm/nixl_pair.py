"""Two real vLLM servers with one of vLLM's own NIXL connectors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.clock import SystemClock
from kvferry.cluster.leftovers import shared_memory_of
from kvferry.cluster.vllm_process import (
    VllmInstance,
    VllmProcess,
    free_ports,
    kill_session,
    session_members,
)
from tests.vllm.conftest import CHUNKS, Answers
from tests.vllm.serving import READY_S, environment_folder

HITS = "vllm:external_prefix_cache_hits_total"
_LENGTHS = (129, 300, 700, 1500)


def chosen_of(answers: Answers) -> Answers:
    """Return a few of all questions with their answers."""
    return [each for each in answers if len(each[0].tokens) in _LENGTHS]


@dataclass(frozen=True, slots=True)
class NixlPair:
    """A prefill and a decode instance, and what the router is told of them."""

    prefill: VllmProcess
    decode: VllmProcess
    options: tuple[str, ...]


def kill(process: VllmProcess) -> None:
    """End all of an instance's processes at once, and remove what they leave in shared memory."""
    members = session_members(process.pid)
    left = {path for pid in members for path in shared_memory_of(pid)}
    kill_session(process.pid, trackers_too=False)
    for path in left:
        path.unlink(missing_ok=True)


@contextmanager
def running_nixl(model: Path, folder: Path, connector: str, **extra: object) -> Iterator[NixlPair]:
    """Prefill has no prefix cache, as if it had lost every history."""
    ports = free_ports(4)
    instances = [
        VllmInstance(
            python=environment_folder() / "bin" / "python",
            model=str(model),
            port=ports[number],
            side_channel_port=ports[2 + number],
            core=number % (os.cpu_count() or 1),
            dtype="float32",
            max_model_tokens=4096,
            arguments=(*CHUNKS, *(("--no-enable-prefix-caching",) if number == 0 else ())),
            transfer_config={
                "kv_connector": connector,
                "kv_role": "kv_both",
                "engine_id": f"engine-{number}",
                "kv_connector_extra_config": extra,
            },
        )
        for number in range(2)
    ]
    prefill, decode = (
        VllmProcess(name, instance, folder, SystemClock())
        for name, instance in zip(("prefill", "decode"), instances, strict=True)
    )
    options: tuple[str, ...] = ("--prefill", instances[0].url, "--decode", instances[1].url)
    address = f"{instances[0].url}=engine-0@127.0.0.1:{ports[2]}"
    is_push = connector == "NixlPushConnector"
    options += ("--nixl", address) if is_push else ("--engine", "vllm-nixl")
    with asyncio.Runner() as runner:
        try:
            for process in (prefill, decode):
                runner.run(process.start(os.environ))
            for process in (prefill, decode):
                runner.run(process.wait_healthy(READY_S))
            yield NixlPair(prefill, decode, options)
        finally:
            for process in (prefill, decode):
                runner.run(process.stop())
