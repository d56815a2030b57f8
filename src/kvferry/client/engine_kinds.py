"""The kinds of engine whose legs can be asked, and how vLLM's NIXL connectors name an engine. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EngineKind(enum.StrEnum):
    """What all instances of a router are; one kind for a router."""

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
