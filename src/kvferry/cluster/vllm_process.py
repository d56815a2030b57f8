"""One ``vllm serve`` and all that it starts: begun, awaited, paused, resumed, and ended for good.

Meant for CPU hosts, where several instances share the machine; knows vLLM's options, not its code.
Its processes are a session of their own; nothing of it is left behind, shared memory included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvferry.clock import Clock
from kvferry.cluster.leftovers import shared_memory_of
from kvferry.cluster.process import ManagedProcess
from kvferry.errors import ClusterError, ConfigError

_POLL_S = 0.2
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=2)
_GRACE_S = 20.0
_END_S = 10.0
"""From SIGKILL to the end of every process."""
_TRACKERS_S = 5.0
"""Of those, how long resource trackers have to end by themselves."""
SERVED_NAME = "m"
"""What requests call the model."""
NO_BUSY_WAIT_FOLDER = Path(__file__).parents[3] / "tools" / "vllm_no_busy_wait"
"""On PYTHONPATH of an instance it has busy waits sleep. Part of a checkout, not of a wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInstance:
    """One instance, on a core of its own."""

    python: Path
    """Of the environment that vLLM is installed in."""
    model: str
    port: int
    side_channel_port: int
    """Where vLLM's own NIXL connectors listen; free, and another for each instance."""
    core: int
    dtype: str = "bfloat16"
    max_model_tokens: int = 8192
    kv_cache_gib: int = 1
    waits_quietly: bool = True
    """Whether vLLM's busy waits sleep instead."""
    transfer_config: Mapping[str, object] | None = None
    arguments: tuple[str, ...] = ()
    """Further ones of ``vllm serve``."""

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"


def vllm_command(instance: VllmInstance) -> list[str]:
    """Return the command line that serves ``instance`` on the loopback interface."""
    command = [
        str(instance.python.parent / "vllm"), "serve", instance.model,
        "--host", "127.0.0.1", "--port", str(instance.port),
        "--served-model-name", SERVED_NAME,
        "--dtype", instance.dtype, "--enforce-eager",
        "--max-model-len", str(instance.max_model_tokens), "--max-num-seqs", "16",
        *instance.arguments,
    ]  # fmt: skip
    if instance.transfer_config is not None:
        command += ["--kv-transfer-config", json.dumps(dict(instance.transfer_config))]
    return command


def vllm_environment(base: Mapping[str, str], instance: VllmInstance) -> dict[str, str]:
    """Return ``base`` with what an instance needs that shares a host without a GPU or a network.

    Raises ``ConfigError`` if it is to wait quietly and what that takes is not here.
    """
    added = {
        "VLLM_CPU_KVCACHE_SPACE": str(instance.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": str(instance.core),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(instance.side_channel_port),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if instance.waits_quietly:
        if not NO_BUSY_WAIT_FOLDER.is_dir():
            raise ConfigError(
                f"{NO_BUSY_WAIT_FOLDER} is not there, which has vLLM's busy waits sleep: run "
                "kvferry from a checkout, or leave the waits as they are (--as-is)"
            )
        added["PYTHONPATH"] = str(NO_BUSY_WAIT_FOLDER)
    return {**base, **added}


class VllmProcess:
    """An instance's processes. All methods are called on one event loop."""

    def __init__(self, name: str, instance: VllmInstance, run_folder: Path, clock: Clock) -> None:
        self.instance = instance
        self._process = ManagedProcess(name, run_folder, clock)
        self._clock = clock

    @property
    def pid(self) -> int:
        """Process and session id of the server's first process."""
        return self._process.pid

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start it, pinned to its core; returns before it serves."""
        await self._process.start(
            vllm_command(self.instance),
            (self.instance.core,),
            vllm_environment(environment, self.instance),
        )

    async def wait_healthy(self, deadline_s: float) -> None:
        """Return when it serves.

        Raises ``ClusterError`` with the end of its log if it dies, or does not serve ``deadline_s``
        seconds from now.
        """
        end_s = self._clock.monotonic_s() + deadline_s
        async with aiohttp.ClientSession(timeout=_PROBE_TIMEOUT) as session:
            while not await _is_healthy(session, self.instance.url):
                if self._process.has_ended:
                    raise self._process.death()
                if self._clock.monotonic_s() >= end_s:
                    raise ClusterError(
                        f"{self._process.name} did not serve within {deadline_s:.0f} s\n"
                        f"{self._process.log_tail()}"
                    )
                await asyncio.sleep(_POLL_S)

    @property
    def has_ended(self) -> bool:
        """Whether the server's first process has ended."""
        return self._process.has_ended

    def death(self) -> ClusterError:
        """Return the error that says how it ended, with the end of its log."""
        return self._process.death()

    def pause(self) -> None:
        """Stop all of its processes until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End every process of it and remove what they leave in shared memory. Safe to repeat."""
        if not self._process.has_started:
            return
        left = self._shared_memory()
        self.resume()
        await self._process.stop(_GRACE_S)
        left |= await self._end_session()
        for path in left:
            path.unlink(missing_ok=True)

    async def _end_session(self) -> set[Path]:
        """Kill what has outlived the first process; return what of it was in shared memory.

        One that is still starting shares more than it did when it was told to end.
        """
        began_s = self._clock.monotonic_s()
        left: set[Path] = set()
        while session_members(self._process.pid):
            left |= self._shared_memory()
            for_s = self._clock.monotonic_s() - began_s
            if for_s >= _END_S:
                raise ClusterError(f"processes of {self._process.name} do not end")
            kill_session(self._process.pid, trackers_too=for_s >= _TRACKERS_S)
            await asyncio.sleep(_POLL_S)
        return left

    def _shared_memory(self) -> set[Path]:
        members = session_members(self._process.pid)
        return {path for pid in members for path in shared_memory_of(pid)}

    def _signal(self, number: signal.Signals) -> None:
        for pid in session_members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def kill_session(session: int, *, trackers_too: bool) -> None:
    """Kill the processes of a session.

    Without ``trackers_too``, Python's resource trackers are left: they serve nobody, remove the
    semaphores that the others have left, and end by themselves.
    """
    for pid in session_members(session):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if trackers_too or b"resource_tracker" not in command:
                os.kill(pid, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Return the processes of a session that have not ended, from ``/proc``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in ("Z", "X"):
                found.append(int(entry.name))
    return found


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def free_ports(count: int) -> list[int]:
    """Return different ports of the loopback interface that nobody listens on now.

    vLLM can't say which port it has taken, so it has to be told one.
    """
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
