"""The plugin's references in vLLM's pool: which there are, which of them are retention, and how
that gives way to what vLLM needs. On the scheduler's thread only: nobody else may touch that pool.

vLLM's pool has no eviction class of its own, so retention here is a reference. It has to give way
by itself: whoever needs room asks for it, and tails of the oldest conversations go first.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.blocks.chain_tree import ChainTree
from kvferry.clock import Clock
from kvferry.protocol.hashing import block_hashes, partial_content
from kvferry.protocol.ids import BlockHash, BlockNumber
from kvferry.vllm_plugin.orders import Forget, LetGo, MakeRoom, PoolFigures, Retain
from kvferry.vllm_plugin.request_state import EnginePool, EngineRequest, as_blocks, blocks_for
from kvferry.vllm_plugin.settings import PluginSettings
from kvferry.vllm_plugin.worker_link import Workers

MAX_FORGET_TRIES = 50
_FORGET_STEP_S = 0.005
"""Together 0.25 s for what peers read or are sent at the moment of a reset: an update of weights
fails while they do. The engine stands still meanwhile."""
_STEPS_TO_COME_BACK = 3
"""Until then, what was given up may still be on its way through a step's report."""
Hashes = tuple[BlockHash, ...]


class PoolReferences:
    """References taken in vLLM's pool before blocks are named to the worker half."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._num_figures = 0
        self._num_given_back = 0
        self.num_taken = 0
        """References that have not been given back."""

    @property
    def num_free(self) -> int:
        """Blocks of the pool that nobody has."""
        return self._pool.get_num_free_blocks()

    def figures(self, leaving: Sequence[int] = ()) -> PoolFigures:
        """Return the pool's figures once a request has let go of its blocks ``leaving``."""
        self._num_figures += 1
        num_freed = sum(self._pool.blocks[block].ref_cnt == 1 for block in leaving)
        return PoolFigures(self._num_figures, self.num_free + num_freed, self._num_given_back)

    def take(self, blocks: Sequence[BlockNumber]) -> None:
        """Take one on each block."""
        self.num_taken += len(blocks)
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def give_back(self, blocks: Sequence[BlockNumber]) -> None:
        """Give one of each block back; tails of a sequence are reused before its head."""
        self.num_taken -= len(blocks)
        self._num_given_back += len(blocks)
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


class BlockDemand:
    """How many blocks of vLLM's pool the requests in service will need soon: the prompts that do
    not have all their blocks yet, those that wait and those in chunks. Pure."""

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
        size = self._block_size
        return blocks_for(num_tokens, size) - blocks_for(num_computed, size)


@dataclass(slots=True)
class _Conversation:
    last_hash: BlockHash
    """Of its last full block, whether or not so much of it is retained."""
    ends_at_s: float


class RetainedConversations:
    """Conversations as chains of block hashes, least recently retained first. Pure."""

    def __init__(self, max_blocks: int, duration_s: float, clock: Clock) -> None:
        self._max_blocks = max_blocks
        self._duration_s = duration_s
        self._clock = clock
        self._chains = ChainTree()
        self._conversations: OrderedDict[int, _Conversation] = OrderedDict()
        """By the number of their chain."""
        self._by_last_hash: dict[BlockHash, int] = {}
        self._numbers = itertools.count()
        self._next_end_s = math.inf
        """No conversation ends before: most steps need not look at any."""

    @property
    def num_blocks(self) -> int:
        """Distinct retained blocks."""
        return self._chains.num_hashes

    def add(
        self, hashes: Sequence[BlockHash], duration_s: float | None, *, has_partial: bool = False
    ) -> tuple[range, Hashes]:
        """Retain a conversation so far; ``has_partial``: its last block is filled in part.

        Returns which of its blocks were not retained before and are now, and the hashes to let go
        of: of its earlier turns, and of what is beyond the cap. ``duration_s`` may shorten the
        time; 0 ends the conversation.
        """
        lasts_s = self._duration_s if duration_s is None else min(duration_s, self._duration_s)
        earlier = [self._by_last_hash[h] for h in hashes if h in self._by_last_hash]
        kept = hashes[: self._max_blocks] if lasts_s > 0 else ()
        number, num_before = next(self._numbers), self.num_blocks
        if kept:
            self._chains.add(number, kept)
        # A block is retained only with all that are before it.
        num_known = len(kept) - (self.num_blocks - num_before)
        leaving = self._end(earlier)
        if kept:
            conversation = _Conversation(
                hashes[-2 if has_partial else -1], self._clock.monotonic_s() + lasts_s
            )
            self._next_end_s = min(self._next_end_s, conversation.ends_at_s)
            self._conversations[number] = conversation
            self._by_last_hash[conversation.last_hash] = number
        leaving += self.give_way(self.num_blocks - self._max_blocks)
        return range(num_known, len(kept)), leaving

    def expire(self) -> Hashes:
        """End what is past its time; return the hashes to let go of."""
        now_s = self._clock.monotonic_s()
        if now_s < self._next_end_s:
            return ()
        leaving = self._end([n for n, c in self._conversations.items() if c.ends_at_s <= now_s])
        ends = (conversation.ends_at_s for conversation in self._conversations.values())
        self._next_end_s = min(ends, default=math.inf)
        return leaving

    def give_way(self, num_blocks: int) -> Hashes:
        """Return hashes to let go of, so that ``num_blocks`` fewer blocks are retained."""
        leaving: list[BlockHash] = []
        max_left = self.num_blocks - num_blocks
        while self._conversations and self.num_blocks > max_left:
            oldest = next(iter(self._conversations))
            leaving += self._chains.shorten(oldest, self.num_blocks - max_left)
            if oldest not in self._chains:
                self._forget(oldest)
        return tuple(leaving)

    def _end(self, numbers: Iterable[int]) -> Hashes:
        leaving: list[BlockHash] = []
        for number in numbers:
            leaving += self._chains.remove(number)
            self._forget(number)
        return tuple(leaving)

    def _forget(self, number: int) -> None:
        conversation = self._conversations.pop(number)
        if self._by_last_hash.get(conversation.last_hash) == number:
            del self._by_last_hash[conversation.last_hash]


class Retention:
    """Finished conversations, kept by references that give way by themselves."""

    def __init__(
        self, settings: PluginSettings, workers: Workers, references: PoolReferences, clock: Clock
    ) -> None:
        self._block_size = workers.hello.block_size_tokens
        self._workers = workers
        self._references = references
        max_blocks = int(settings.max_retained_share * workers.hello.num_blocks)
        self._retained = RetainedConversations(max_blocks, settings.retention_s, clock)
        self._is_on = settings.retention_s > 0
        self._num_steps_to_wait = 0

    def retain(
        self,
        request: EngineRequest,
        root: BlockHash,
        block_ids: Sequence[int],
        duration_s: float | None = None,
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
        if partial is not None:
            hashes.append(partial.block_hash)
        has_partial = partial is not None
        new, leaving = self._retained.add(hashes, duration_s, has_partial=has_partial)
        if new:
            blocks = as_blocks(block_ids[new.start : new.stop])
            self._references.take(blocks)
            is_whole = new.stop == len(hashes)
            order = Retain(
                tuple(hashes[new.start : new.stop]), blocks, partial if is_whole else None
            )
            self._workers.send(order)
        self._let_go(leaving)

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
            self._workers.send(MakeRoom(short - len(leaving)))

    def forget(self) -> None:
        """Retain, offer and send nothing of what the pool holds; take all references back.

        What a peer goes on reading is left to come back by itself.
        """
        self._retained.give_way(self._retained.num_blocks)
        for _ in range(MAX_FORGET_TRIES):
            self._references.give_back(self._workers.ask(Forget()).returned)
            if not self._references.num_taken:
                return
            time.sleep(_FORGET_STEP_S)

    def _let_go(self, hashes: Hashes) -> None:
        if hashes:
            self._workers.send(LetGo(hashes))
