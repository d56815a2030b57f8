"""The kinds of engine whose legs are asked, and how NIXL connectors name an engine. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.protocol.params import Mode


class EngineKind(enum.StrEnum):
    """What is served at a URL, and with which connector."""

    AUTO = "auto"
    """``VLLM_NIXL_PUSH`` where a NIXL address is given, ``VLLM`` where a control port is, else
    ``KVFERRY``."""
    KVFERRY = "kvferry"
    VLLM = "vllm"
    """vLLM with FerryConnector."""
    VLLM_NIXL = "vllm-nixl"
    """vLLM with its own NixlConnector."""
    VLLM_NIXL_PUSH = "vllm-nixl-push"
    """vLLM with its own NixlPushConnector."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """How KV may be moved between such instances."""
        match self:
            case EngineKind.VLLM_NIXL:
                return (Mode.PULL,)
            case EngineKind.VLLM_NIXL_PUSH:
                return (Mode.PUSH,)
            case _:
                return (Mode.PULL, Mode.PUSH)


VLLM_KINDS = (EngineKind.VLLM, EngineKind.VLLM_NIXL, EngineKind.VLLM_NIXL_PUSH)


@dataclass(frozen=True, slots=True)
class NixlAddress:
    """What vLLM's NIXL connectors tell their peers of an engine."""

    engine_id: str
    host: str
    port: int
    """Of its side channel."""
    tp_size: int = 1

    @property
    def endpoint(self) -> str:
        """The side channel as a ZeroMQ endpoint."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"
