"""What starts one ``vllm serve``: its command line and its environment. Pure.

Meant for CPU hosts, where several instances share the machine; knows vLLM's options, not its code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SERVED_NAME = "m"
"""What requests call the model."""
CALM_FOLDER = Path(__file__).parent / "vllm_calm"
"""On PYTHONPATH of an instance it has busy waits sleep instead."""


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
    """Return ``base`` with what an instance needs that shares a host without a GPU or a network."""
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
        added["PYTHONPATH"] = str(CALM_FOLDER)
    return {**base, **added}
