"""The references that the plugin has in vLLM's pool, and those of them that are retention.

On the scheduler's thread only: nobody else may touch that pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from kvferry.blocks.partials import PartialContent, partial_content
from kvferry.clock import Clock
from kvferry.protocol.hashing import block_hashes
from kvferry.protocol.ids import BlockHash, BlockNumber
from kvferry.vllm_plugin.conversations import Hashes, RetainedConversations
from kvferry.vllm_plugin.orders import (
    Answer,
    Blocks,
    Forget,
    LetGo,
    MakeRoom,
    Order,
    PoolFigures,
    Retain,
    WorkerHello,
)
from kvferry.vllm_plugin.settings import PluginSettings
from kvferry.vllm_plugin.request_state import EnginePool, EngineRequest, as_blocks

MAX_FORGET_TRIES = 50
_FORGET_STEP_S = 0.005
"""Together 0.25 s for what peers read or are sent at the moment of a reset: an update of weights
fails while they do. The engine stands still meanwhile."""
_STEPS_TO_COME_BACK = 3
"""Until then, what was given up may still be on its way through a step's report."""


class OrderSender(Protocol):
    """Where orders go."""

    def send(self, order: Order) -> None:
        """Pass an order on."""
        ...

    def ask(self, order: Order) -> Answer:
        """Pass an order on and wait for its answer."""
        ...


class PoolReferences:
    """References taken in vLLM's pool before blocks are named to the worker half."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._num_taken = 0
        self._num_given_back = 0
        self._num_told = 0

    @property
    def num_taken(self) -> int:
        """References that have not been given back."""
        return self._num_taken

    @property
    def num_free(self) -> int:
        """Blocks of the pool that nobody has."""
        return self._pool.get_num_free_blocks()

    def figures(self, leaving: Sequence[int] = ()) -> PoolFigures:
        """Return the pool's figures once a request has let go of its blocks ``leaving``."""
        self._num_told += 1
        num_freed = sum(self._pool.blocks[block].ref_cnt == 1 for block in leaving)
        return PoolFigures(self._num_told, self.num_free + num_freed, self._num_given_back)

    def take(self, blocks: Sequence[BlockNumber]) -> None:
        """Take one on each block."""
        self._num_taken += len(blocks)
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def give_back(self, blocks: Sequence[BlockNumber]) -> None:
        """Give one of each block back; tails of a sequence are reused before its head."""
        self._num_taken -= len(blocks)
        self._num_given_back += len(blocks)
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


class Retaining:
    """Retention of finished conversations, as references that give way by themselves."""

    def __init__(  # noqa: PLR0913 - every part it works with
        self,
        settings: PluginSettings,
        hello: WorkerHello,
        block_size_tokens: int,
        clock: Clock,
        orders: OrderSender,
        references: PoolReferences,
    ) -> None:
        self._block_size = block_size_tokens
        self._orders = orders
        self._references = references
        max_blocks = int(settings.max_retained_share * hello.num_blocks)
        self._retained = RetainedConversations(max_blocks, settings.retention_s, clock)
        self._is_on = settings.retention_s > 0
        self._num_steps_to_wait = 0

    def retain(
        self,
        request: EngineRequest,
        root: BlockHash,
        block_ids: Sequence[int],
        duration_s: float | None,
    ) -> None:
        """A request that has answered ends: keep its blocks, prompt and answer, the last one too
        if it is filled in part; but nothing of less than a block."""
        prompt, tokens = request.prompt_token_ids, request.all_token_ids
        if not self._is_on or prompt is None or len(tokens) <= len(prompt):
            return
        # What is in flight may not be computed; the last token never is.
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens
        num_computed = min(num_computed, len(tokens) - 1)
        num_full = min(num_computed // self._block_size, len(block_ids))
        if num_full <= 0:
            return
        num_in_full = num_full * self._block_size
        hashes = block_hashes(root, tokens[:num_in_full], self._block_size)
        rest = tokens[num_in_full:num_computed] if num_full < len(block_ids) else ()
        partial = partial_content(hashes[-1], rest) if rest else None
        num_kept, leaving = self._retained.add(
            hashes, duration_s, partial.block_hash if partial else None
        )
        if num_kept:
            self._send_retain(hashes, partial, as_blocks(block_ids[:num_kept]))
        self._let_go(leaving)

    def _send_retain(
        self, hashes: Sequence[BlockHash], partial: PartialContent | None, blocks: Blocks
    ) -> None:
        self._references.take(blocks)
        if partial is not None and len(blocks) > len(hashes):
            order = Retain((*hashes, partial.block_hash), blocks, partial.num_tokens)
        else:
            order = Retain(tuple(hashes[: len(blocks)]), blocks)
        self._orders.send(order)

    def keep_room(self, num_running_blocks: int, num_waiting_blocks: int) -> None:
        """Retention, then unread handoffs, give way to what runs and to the largest prompt.

        Called once a step; ``num_waiting_blocks`` are those of the largest prompt that has none.
        """
        self._let_go(self._retained.expire())
        self._num_steps_to_wait = max(0, self._num_steps_to_wait - 1)
        short = num_running_blocks + num_waiting_blocks - self._references.num_free
        if short <= 0 or self._num_steps_to_wait:
            return
        self._num_steps_to_wait = _STEPS_TO_COME_BACK
        leaving = self._retained.give_way(short)
        self._let_go(leaving)
        if num_waiting_blocks and len(leaving) < short:
            self._orders.send(MakeRoom(short - len(leaving)))

    def forget(self) -> None:
        """Retain, offer and send nothing of what the pool holds; take all references back.

        What a peer goes on reading is left to come back by itself.
        """
        self._retained.clear()
        for _ in range(MAX_FORGET_TRIES):
            self._references.give_back(self._orders.ask(Forget()).returned)
            if not self._references.num_taken:
                return
            time.sleep(_FORGET_STEP_S)

    def _let_go(self, hashes: Hashes) -> None:
        if hashes:
            self._orders.send(LetGo(hashes))
