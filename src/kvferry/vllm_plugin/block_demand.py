"""How many blocks of vLLM's pool the requests in service will need soon. Pure."""

from __future__ import annotations

from kvferry.vllm_plugin.request_state import EngineRequest


class BlockDemand:
    """The prompts that do not have all their blocks yet: those that wait, and those in chunks."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self._waiting: dict[str, EngineRequest] = {}
        self._growing: dict[str, EngineRequest] = {}

    def arrive(self, request: EngineRequest) -> None:
        """A request has arrived."""
        self._waiting[request.request_id] = request

    def admit(self, request: EngineRequest) -> None:
        """A request has its first blocks."""
        if self._waiting.pop(request.request_id, None) is not None:
            self._growing[request.request_id] = request

    def preempt(self, request_id: str) -> None:
        """A request has lost its blocks and waits again, if it is one whose prompt is known."""
        request = self._growing.pop(request_id, None)
        if request is not None:
            self._waiting[request_id] = request

    def end(self, request_id: str) -> None:
        """A request has ended."""
        self._waiting.pop(request_id, None)
        self._growing.pop(request_id, None)

    def num_running_blocks(self) -> int:
        """Blocks that prompts which are computed in chunks still lack."""
        return sum(self._lacking(request) for request in self._growing.values())

    def num_waiting_blocks(self) -> int:
        """Blocks of the largest prompt that waits."""
        return max((self._lacking(request) for request in self._waiting.values()), default=0)

    def _lacking(self, request: EngineRequest) -> int:
        num_tokens = len(request.all_token_ids)
        num_computed = min(request.num_computed_tokens, num_tokens)
        return self._blocks_for(num_tokens) - self._blocks_for(num_computed)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
