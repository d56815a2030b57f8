"""An engine on a tiny model with a connector that a test drives by hand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvferry.blocks.pool import BlockPool
from kvferry.clock import SystemClock
from kvferry.connector.ports import (
    ConnectorSnapshot,
    FirstTokenArrival,
    HandoffOffer,
    HistoryRequest,
    PrefillEnd,
    PromptIdentity,
    ReceiveOutcome,
    ReceiveResult,
)
from kvferry.engine.config import EngineConfig
from kvferry.engine.core import Forward
from kvferry.engine.model import load_model
from kvferry.engine.paged_cache import PagedCache
from kvferry.engine.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from kvferry.engine.runner import Engine
from kvferry.errors import LocalProtocolError, RequestError
from kvferry.protocol.ids import (
    BlockNumber,
    Epoch,
    InstanceId,
    RequestId,
    TransferId,
)
from kvferry.protocol.params import (
    FirstToken,
    KvTransferParams,
    Mode,
    PeerAddress,
    TokenLogprob,
)
from tests.support.block_integrity import check_integrity

TIMEOUT_S = 180.0
PEER = PeerAddress(InstanceId("prefill-0"), Epoch(7), "tcp://127.0.0.1:1")


class Answer:
    """Collects one request's outputs; `wait` returns when the last one has come."""

    def __init__(self, request_id: RequestId, may_go_on: threading.Event | None = None) -> None:
        """``may_go_on`` keeps the engine's thread from going on after the first output."""
        self.request_id = request_id
        self._may_go_on = may_go_on
        self.outputs: list[TokenOutput] = []
        self._changed = threading.Condition()

    def __call__(self, output: TokenOutput) -> None:
        with self._changed:
            assert not self.is_finished, "an output after the last one"
            self.outputs.append(output)
            self._changed.notify_all()
        if self._may_go_on is not None:
            assert self._may_go_on.wait(TIMEOUT_S)

    @property
    def is_finished(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        return [output.token_id for output in self.outputs if output.token_id is not None]

    @property
    def reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    def wait(self) -> Answer:
        with self._changed:
            assert self._changed.wait_for(lambda: self.is_finished, TIMEOUT_S), self.outputs
        return self

    def wait_tokens(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens) >= count, TIMEOUT_S)


@dataclass
class Receive:
    blocks: tuple[BlockNumber, ...]
    first_block: int


@dataclass
class HistoryRead:
    peer: PeerAddress
    history_request: HistoryRequest


@dataclass
class FakeConnector:
    """Records calls; `finish_receive` and `copy_from` end receives."""

    pool: BlockPool
    engine: Engine | None = None
    offers: dict[TransferId, tuple[BlockNumber, ...]] = field(default_factory=dict)
    identities: dict[TransferId, PromptIdentity] = field(default_factory=dict)
    begun: dict[TransferId, PromptIdentity] = field(default_factory=dict)
    receives: dict[TransferId, Receive] = field(default_factory=dict)
    ended: list[TransferId] = field(default_factory=list)
    results: list[ReceiveResult] = field(default_factory=list)
    modes: dict[TransferId, Mode] = field(default_factory=dict)
    sends: dict[TransferId, list[tuple[str, int]]] = field(default_factory=dict)
    """Push: what the engine has said of each."""
    first_tokens: list[FirstTokenArrival] = field(default_factory=list)
    stopped: list[TransferId] = field(default_factory=list)
    unwanted: set[TransferId] = field(default_factory=set)
    """Push: let go before the send was begun."""
    refused: set[TransferId] = field(default_factory=set)
    """Push: may not have blocks yet."""
    broken: set[TransferId] = field(default_factory=set)
    """Fails in the moment when it is given blocks."""
    histories: dict[TransferId, HistoryRead] = field(default_factory=dict)
    contacted: list[PeerAddress] = field(default_factory=list)
    refuses_contact: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin_receive(
        self,
        transfer_id: TransferId,
        peer: PeerAddress,
        prompt: PromptIdentity,
        *,
        mode: Mode = Mode.PULL,
    ) -> None:
        if transfer_id in self.begun:
            raise RequestError(f"transfer id {transfer_id} is in use")
        self.begun[transfer_id] = prompt
        self.modes[transfer_id] = mode

    def may_receive(self, transfer_id: TransferId, num_blocks: int) -> bool:
        return transfer_id not in self.refused

    def give_back(self, transfer_id: TransferId) -> bool:
        receive = self.receives.pop(transfer_id, None)
        if receive is None:
            return False
        self.pool.drop(receive.blocks)
        return True

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> None:
        assert transfer_id in self.begun
        if transfer_id in self.broken:
            raise LocalProtocolError("it has just ended")
        self.pool.hold(blocks)
        with self.changed:
            self.receives[transfer_id] = Receive(tuple(blocks), first_block)
            self.changed.notify_all()

    def end_receive(self, transfer_id: TransferId, *, needed: bool) -> None:
        with self.changed:
            self.ended.append(transfer_id)
            self.changed.notify_all()

    def contact(self, peer: PeerAddress) -> None:
        if self.refuses_contact:
            raise RequestError("that address is not allowed")
        self.contacted.append(peer)

    def read_history(self, peer: PeerAddress, history_request: HistoryRequest) -> TransferId:
        self.pool.hold(history_request.blocks)
        history_id = TransferId(f"history-{len(self.histories) + 1}")
        with self.changed:
            self.histories[history_id] = HistoryRead(peer, history_request)
            self.changed.notify_all()
        return history_id

    def take_results(self) -> list[ReceiveResult]:
        with self.changed:
            taken, self.results = self.results, []
            return taken

    def take_first_tokens(self) -> list[FirstTokenArrival]:
        with self.changed:
            taken, self.first_tokens = self.first_tokens, []
            return taken

    def begin_send(self, transfer_id: TransferId, prompt: PromptIdentity) -> None:
        if transfer_id in self.sends:
            raise RequestError(f"transfer id {transfer_id} is in use")
        with self.changed:
            self.sends[transfer_id] = [("begin", 0)]
            self.identities[transfer_id] = prompt
            self.changed.notify_all()

    def advance_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], num_tokens: int
    ) -> None:
        self.sends[transfer_id].append(("advance", num_tokens))

    def pause_send(self, transfer_id: TransferId) -> None:
        if self.sends[transfer_id][-1] != ("pause", 0):
            self.sends[transfer_id].append(("pause", 0))

    def complete_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], end: PrefillEnd
    ) -> HandoffOffer:
        self.sends[transfer_id].append(("complete", end.first_token.token_id))
        self.pool.hold(blocks)
        self.offers[transfer_id] = tuple(blocks)
        return HandoffOffer(PEER, lease_s=30.0)

    def is_send_wanted(self, transfer_id: TransferId) -> bool:
        return transfer_id not in self.unwanted

    def take_stopped_sends(self) -> list[TransferId]:
        with self.changed:
            taken, self.stopped = self.stopped, []
            return taken

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> HandoffOffer:
        if transfer_id in self.offers:
            raise RequestError(f"transfer id {transfer_id} is in use")
        self.pool.hold(blocks)
        self.offers[transfer_id] = tuple(blocks)
        self.identities[transfer_id] = prompt
        return HandoffOffer(PEER, lease_s=30.0)

    def withdraw(self, transfer_id: TransferId) -> None:
        if transfer_id in self.sends:
            self.sends[transfer_id].append(("withdraw", 0))
        self.pool.drop(self.offers.pop(transfer_id, ()))

    def give_up_oldest(self, num_blocks: int) -> int:
        freed = 0
        for transfer_id in list(self.offers):
            if freed >= num_blocks:
                break
            freed += len(self.offers[transfer_id])
            self.withdraw(transfer_id)
        return freed

    def snapshot(self) -> ConnectorSnapshot:
        return ConnectorSnapshot()

    def wait_receive(self, transfer_id: TransferId) -> Receive:
        with self.changed:
            assert self.changed.wait_for(lambda: transfer_id in self.receives, TIMEOUT_S)
            return self.receives[transfer_id]

    def tell_first_token(self, transfer_id: TransferId, token_id: int, seed: int = 5) -> None:
        assert self.engine is not None
        logprob = TokenLogprob(-0.5, ((token_id, -0.5),))
        end = PrefillEnd(FirstToken(token_id, seed, logprob), 12.5)
        with self.changed:
            self.first_tokens.append(FirstTokenArrival(transfer_id, end))
        self.engine.wake()

    def fail(self, transfer_id: TransferId, outcome: ReceiveOutcome) -> None:
        """End a push that has no blocks."""
        assert self.engine is not None
        with self.changed:
            self.results.append(ReceiveResult(transfer_id, outcome, "as the test says"))
        self.engine.wake()

    def stop(self, transfer_id: TransferId) -> None:
        assert self.engine is not None
        with self.changed:
            self.stopped.append(transfer_id)
        self.engine.wake()

    def finish_receive(
        self, transfer_id: TransferId, outcome: ReceiveOutcome, num_bytes: int = 0
    ) -> None:
        assert self.engine is not None
        self.pool.drop(self.wait_receive(transfer_id).blocks)
        with self.changed:
            self.results.append(
                ReceiveResult(transfer_id, outcome, num_bytes=num_bytes, transport="fake")
            )
        self.engine.wake()

    def wait_history(self, count: int = 1) -> tuple[TransferId, HistoryRead]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.histories) >= count, TIMEOUT_S)
            return list(self.histories.items())[-1]

    def finish_history(
        self,
        history_id: TransferId,
        outcome: ReceiveOutcome,
        num_blocks: int = 0,
        num_partial_tokens: int = 0,
    ) -> None:
        assert self.engine is not None
        self.pool.drop(self.histories[history_id].history_request.blocks)
        result = ReceiveResult(
            history_id, outcome, "as the test says", num_bytes=64 * num_blocks,
            num_blocks=num_blocks, num_partial_tokens=num_partial_tokens,
            transport="fake", started_s=1.0, finished_s=1.5,
        )  # fmt: skip
        with self.changed:
            self.results.append(result)
        self.engine.wake()


class Rig:
    """One engine. Use as a context manager: at exit every block must be free."""

    def __init__(
        self,
        folder: Path,
        *,
        forward: Forward | None = None,
        has_connector: bool = True,
        **options: Any,  # noqa: ANN401 - EngineConfig's
    ) -> None:
        self.config = EngineConfig(
            **{"num_blocks": 512, "num_threads": 1, "dtype": "float32", **options}
        )
        model = load_model(folder, self.config)
        shape = model.cache_shape(self.config.block_size_tokens)
        num_blocks = self.config.pool_num_blocks(shape.block_bytes)
        self.pool = BlockPool(num_blocks)
        self.cache = PagedCache(shape, memoryview(bytearray(num_blocks * shape.block_bytes)))
        self.connector = FakeConnector(self.pool)
        self.engine = Engine(
            self.config,
            model,
            self.cache,
            self.pool,
            connector=self.connector if has_connector else None,
            clock=SystemClock(),
            forward=forward,
        )
        self.connector.engine = self.engine
        self._num_requests = 0

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.close()
        if exc_info[0] is None:
            for transfer_id in list(self.connector.offers):
                self.connector.withdraw(transfer_id)
            assert self.pool.num_free == self.pool.num_blocks
            check_integrity(self.pool)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        transfer: KvTransferParams | None = None,
        salt: str = "",
        may_go_on: threading.Event | None = None,
        **sampling: Any,  # noqa: ANN401 - SamplingParams'
    ) -> Answer:
        self._num_requests += 1
        request_id = RequestId(f"request-{self._num_requests}")
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        answer = Answer(request_id, may_go_on)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=params,
            transfer=transfer,
            cache_salt=salt,
        )
        self.engine.submit(request, answer)
        return answer

    def copy_blocks(self, source: Rig, transfer_id: TransferId) -> int:
        """Fill a pending receive with the source's offered blocks; returns the bytes copied."""
        receive = self.connector.wait_receive(transfer_id)
        offered = source.connector.offers[transfer_id][receive.first_block :]
        assert len(offered) == len(receive.blocks)
        for mine, theirs in zip(receive.blocks, offered, strict=True):
            self.cache.blocks[mine].copy_(source.cache.blocks[theirs])
        return len(offered) * self.cache.shape.block_bytes
