"""An engine without a model, and without manners.

It shares prefixes, computes in chunks, preempts, aborts and resets when the walk says so. It drops
its references first and tells the connector later; what it has dropped is given to others and
written over at once. It lies in nothing else: what it hands to the connector is its own at that
moment, and a step has completed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RetentionTable
from kvferry.errors import CapacityError, LocalProtocolError, RequestError
from kvferry.protocol.hashing import partial_content
from kvferry.protocol.ids import BlockNumber, InstanceId, TransferId
from kvferry.protocol.params import Mode, PeerAddress
from kvferry.protocol.prefill_result import FirstToken
from tests.model.ownership import driven as ferry
from tests.model.ownership.content import Memory, Text
from tests.model.ownership.driven import BLOCK_TOKENS
from tests.model.ownership.network import Network

NO_TRANSFER = TransferId("")
END = ferry.PrefillEnd(FirstToken(7, 1))


class Kind(enum.Enum):
    """The part that a request has in a handoff."""

    PLAIN = "plain"
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    """One request of one engine."""

    name: str
    text: Text
    kind: Kind = Kind.PLAIN
    mode: Mode = Mode.PULL
    transfer_id: TransferId = NO_TRANSFER
    history: PeerAddress | None = None
    num_answers: int = 0
    """Tokens to generate and to keep."""
    phase: Phase = Phase.WAITING
    blocks: list[BlockNumber] = field(default_factory=list)
    num_computed: int = 0
    step_end: int | None = None
    """A step runs that computes up to there."""
    is_begun: bool = False
    is_complete: bool = False
    """Handed over."""
    told_blocks: tuple[BlockNumber, ...] = ()
    receive_name: TransferId | None = None
    """Of what fills its blocks now, from ``first_received`` on."""
    first_received: int = 0

    @property
    def is_push_prefill(self) -> bool:
        """Whether the connector follows it while it computes."""
        return self.kind is Kind.PREFILL and self.mode is Mode.PUSH

    @property
    def wants_receive(self) -> bool:
        """Whether its prompt is still to come from a peer."""
        return self.kind is Kind.DECODE


class Engine:
    """One instance's engine."""

    PUBLISHES_EARLY = False
    TELLS_EARLY = False

    def __init__(
        self, name: InstanceId, network: Network, memory: Memory, retention: RetentionTable
    ) -> None:
        self.name = name
        self.network = network
        self.memory = memory
        self.pool: BlockPool = memory.pool
        self.retention = retention
        self.requests: list[Request] = []
        self.untold: list[Callable[[], object]] = []
        """What good manners would have told the connector already."""

    # -- arrival and admission ------------------------------------------------------------------
    def add(self, request: Request, peer: PeerAddress | None = None) -> None:
        """A request arrives; of a decode leg the peer hears at once."""
        if request.kind is Kind.DECODE:
            prompt = ferry.PromptIdentity(len(request.text.tokens), request.text.digest)
            try:
                self.network.call(
                    self.name, "begin_receive", request.transfer_id, peer, prompt, mode=request.mode
                )
            except RequestError:
                return
        self.requests.append(request)

    def admit(self, request: Request) -> None:
        """Give a waiting request its blocks, if there are enough."""
        cached = self._acquire_cached(request)
        try:
            fresh = self.pool.allocate(request.text.num_blocks - len(cached))
        except CapacityError:
            self.pool.drop(cached)
            return
        self.memory.give(fresh, request.name)
        request.blocks = [*cached, *fresh]
        request.num_computed = BLOCK_TOKENS * len(cached)
        if request.wants_receive:
            self._receive(request, len(cached))
            return
        request.phase = Phase.RUNNING
        if request.is_push_prefill and not request.is_begun and not self._begin_send(request):
            self._leave(request)
        elif request.history is not None:
            self._read_history(request, len(cached), request.history)

    def _acquire_cached(self, request: Request) -> list[BlockNumber]:
        text = request.text
        cached = self.pool.acquire_cached(text.cut(len(text.tokens) - 1).hashes)
        for position, block in enumerate(cached):
            self.memory.require(block, text.at(position), f"a cache hit of {request.name}")
        return cached

    def _begin_send(self, request: Request) -> bool:
        prompt = ferry.PromptIdentity(len(request.text.tokens), request.text.digest)
        try:
            self.network.call(self.name, "begin_send", request.transfer_id, prompt)
        except RequestError:
            return False
        request.is_begun = True
        return True

    # -- steps ----------------------------------------------------------------------------------
    def begin_step(self, request: Request, num_tokens: int) -> None:
        """A step begins that computes the next tokens of ``request``."""
        end = min(request.num_computed + num_tokens, len(request.text.tokens))
        lacking = -(-end // BLOCK_TOKENS) - len(request.blocks)
        if lacking > self.pool.num_free:
            return
        fresh = self.pool.allocate(max(0, lacking))
        self.memory.give(fresh, request.name)
        request.blocks += fresh
        request.step_end = end
        if self.PUBLISHES_EARLY:
            self._publish(request, end)
        if self.TELLS_EARLY:
            self._tell_progress(request, end)

    def end_step(self, request: Request) -> None:
        """A step has completed: what it computed is there, from everything before it."""
        start, end, text = request.num_computed, request.step_end, request.text
        assert end is not None
        request.step_end = None
        for position in range(-(-start // BLOCK_TOKENS)):
            wanted = text.cut(start).at(position)
            self.memory.require(request.blocks[position], wanted, f"a step of {request.name}")
        for position in range(start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            self.memory.contents[request.blocks[position]] = text.cut(end).at(position)
        request.num_computed = end
        self._publish(request, end)
        if not self.TELLS_EARLY:
            self._tell_progress(request, end)
        if request.phase is Phase.RUNNING and end == len(text.tokens):
            self._sample(request)

    def _sample(self, request: Request) -> None:
        if request.num_answers == 0 or request.kind is Kind.PREFILL:
            self._finish(request)
            return
        request.num_answers -= 1
        text = request.text
        request.text = Text(text.salt, (*text.tokens, 900 + len(text.tokens)))

    def _publish(self, request: Request, end: int) -> None:
        hashes = request.text.cut(end).hashes
        for block, block_hash in zip(request.blocks, hashes, strict=False):
            self.pool.publish(block, block_hash)

    def _tell_progress(self, request: Request, end: int) -> None:
        if request.kind is not Kind.PREFILL:
            return
        blocks, is_complete = tuple(request.blocks), end == len(request.text.tokens)
        if request.mode is Mode.PULL:
            if is_complete:
                self._offer(request)
            return
        if blocks != request.told_blocks:
            self._count_change(request)
        request.told_blocks = blocks
        if is_complete:
            request.is_complete = True
            self.network.call(self.name, "complete_send", request.transfer_id, blocks, END)
        else:
            self.network.call(self.name, "advance_send", request.transfer_id, blocks, end)

    def _count_change(self, request: Request) -> None:
        changes = self.network.oracle.source_changes
        changes[request.transfer_id] = changes.get(request.transfer_id, 0) + 1

    def _offer(self, request: Request) -> None:
        prompt = ferry.PromptIdentity(len(request.text.tokens), request.text.digest)
        try:
            self.network.call(
                self.name, "offer", request.transfer_id, tuple(request.blocks), prompt
            )
        except RequestError:
            self._leave(request)

    def _finish(self, request: Request) -> None:
        """All is answered: let it be found, and let it go last."""
        hashes = request.text.cut(request.num_computed).hashes
        rest = request.text.tokens[BLOCK_TOKENS * len(hashes) : request.num_computed]
        partial = None
        if hashes and rest:
            content = partial_content(hashes[-1], rest)
            self.pool.publish_partial(request.blocks[len(hashes)], content)
            partial = content.block_hash
        if hashes:
            self.retention.retain(hashes, partial=partial)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self._drop(request)
        request.phase = Phase.ENDED
        if request in self.requests:
            self.requests.remove(request)

    def _drop(self, request: Request) -> None:
        self.pool.drop(request.blocks)
        request.blocks, request.num_computed, request.step_end = [], 0, None

    # -- receives -------------------------------------------------------------------------------
    def _receive(self, request: Request, num_cached: int) -> None:
        fresh = request.blocks[num_cached:]
        oracle, transfer_id = self.network.oracle, request.transfer_id
        is_pull = request.mode is Mode.PULL
        if is_pull or self.network.call(self.name, "may_receive", transfer_id, len(fresh)):
            oracle.set_aside(self.name, transfer_id, request.text, fresh, num_cached)
            request.receive_name, request.first_received = transfer_id, num_cached
            request.phase = Phase.RECEIVING
            try:
                self.network.call(self.name, "receive", transfer_id, fresh, num_cached)
            except LocalProtocolError:
                oracle.targets[self.name, transfer_id].pop()  # it has ended: its result is due
            else:
                return
        request.phase, request.receive_name = Phase.WAITING, None
        self._drop(request)

    def _read_history(self, request: Request, num_cached: int, holder: PeerAddress) -> None:
        usable = request.text.cut(len(request.text.tokens) - 1)
        hashes = usable.hashes[num_cached:]
        if not hashes:
            return
        blocks = request.blocks[num_cached : usable.num_blocks]
        tokens = usable.tokens[BLOCK_TOKENS * num_cached :]
        history_request = ferry.HistoryRequest(
            tuple(hashes), tuple(blocks), tokens, BLOCK_TOKENS, 1
        )
        name = self.network.call(self.name, "read_history", holder, history_request)
        self.network.oracle.set_aside(self.name, name, request.text, blocks, num_cached)
        request.receive_name, request.first_received = name, num_cached
        request.phase, request.history = Phase.RECEIVING, None

    def collect(self) -> None:
        """Take what the connector has to say."""
        for result in self.network.call(self.name, "take_results"):
            self._on_result(result)
        self.network.call(self.name, "take_first_tokens")
        for transfer_id in self.network.call(self.name, "take_stopped_sends"):
            for request in [r for r in self.requests if r.is_push_prefill]:
                if request.transfer_id == transfer_id and request.step_end is None:
                    self.abort(request, is_told=True)

    def _on_result(self, result: ferry.ReceiveResult) -> None:
        """What was received is used; anything else is computed, on other blocks."""
        for request in list(self.requests):
            if request.kind is Kind.DECODE and request.transfer_id == result.transfer_id:
                request.kind = Kind.PLAIN
            elif request.receive_name != result.transfer_id:
                continue
            if request.receive_name is None:
                continue  # it has no blocks yet
            is_received = result.outcome is ferry.ReceiveOutcome.RECEIVED
            if is_received:
                self._use(request, result)
            else:
                self._drop(request)
                request.phase = Phase.WAITING
            request.receive_name = None

    def _use(self, request: Request, result: ferry.ReceiveResult) -> None:
        num_blocks = result.num_blocks
        num_tokens = len(request.text.tokens)
        is_history = request.kind is Kind.PREFILL
        if is_history:
            num_full = num_blocks - (1 if result.num_partial_tokens else 0)
            num_tokens = BLOCK_TOKENS * (request.first_received + num_full)
            num_tokens += result.num_partial_tokens
        elif request.mode is Mode.PUSH:
            num_blocks = len(request.blocks) - request.first_received
        self.network.oracle.check_received(self.name, result, num_blocks)
        request.num_computed = num_tokens
        request.phase = Phase.RUNNING
        self._publish(request, num_tokens)
        if not is_history:
            self._sample(request)

    def give_back(self, request: Request) -> None:
        """The engine needs the blocks of a push that is under way; it will give others."""
        if self.network.call(self.name, "give_back", request.transfer_id):
            self._drop(request)
            request.phase, request.receive_name = Phase.WAITING, None

    # -- bad manners ----------------------------------------------------------------------------
    def preempt(self, request: Request, *, is_told: bool) -> None:
        """An older request needs the blocks."""
        self._stop_receiving(request, is_told=is_told)
        self._drop(request)
        request.phase = Phase.WAITING
        if request.is_push_prefill and request.is_begun:
            self._tell(is_told, lambda: self._pause(request))

    def _pause(self, request: Request) -> None:
        self._count_change(request)
        try:
            self.network.call(self.name, "pause_send", request.transfer_id)
        except LocalProtocolError:
            # Told too late, of what is handed over: refused, and nothing has changed.
            assert request.is_complete

    def abort(self, request: Request, *, is_told: bool) -> None:
        """Its client has gone."""
        self._stop_receiving(request, is_told=is_told)
        if request.kind is Kind.DECODE:
            self._tell(is_told, lambda: self._end_receive(request.transfer_id, needed=False))
        if request.kind is Kind.PREFILL:
            self._tell(
                is_told, lambda: self.network.call(self.name, "withdraw", request.transfer_id)
            )
        self._leave(request)

    def _stop_receiving(self, request: Request, *, is_told: bool) -> None:
        name = request.receive_name
        if name is None:
            return
        self._tell(is_told, lambda: self._end_receive(name, needed=True))
        request.receive_name = None
        if request.kind is Kind.DECODE:
            request.kind = Kind.PLAIN

    def _end_receive(self, name: TransferId, *, needed: bool) -> None:
        self.network.call(self.name, "end_receive", name, needed=needed)

    def _tell(self, is_told: bool, call: Callable[[], object]) -> None:
        if is_told:
            call()
        else:
            self.untold.append(call)

    def catch_up(self) -> None:
        """Tell the connector what it should have heard before."""
        untold, self.untold = self.untold, []
        for call in untold:
            call()

    def grab(self, count: int) -> None:
        """Others need ``count`` free blocks for a moment, and write all over them."""
        blocks = self.pool.allocate(min(count, self.pool.num_free))
        self.memory.give(blocks, "others")
        self.pool.drop(blocks)

    def reset(self) -> None:
        """Nothing is to be found by its content any more."""
        self.retention.release_all()
        self.pool.clear_cache()
