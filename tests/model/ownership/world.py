"""Three instances, and what every walk over them shares: arrivals, and what is true in the end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from hypothesis.stateful import RuleBasedStateMachine

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RenewingBlocks, RetentionLimits, RetentionTable
from kvferry.protocol.ids import Epoch, InstanceId, TransferId
from kvferry.protocol.params import Mode, PeerAddress
from tests.model.ownership.content import Memory, Text
from tests.model.ownership.driven import BLOCK_TOKENS, ConnectorSnapshot, Driven, Register
from tests.model.ownership.engine import Engine, Kind, Phase, Request
from tests.model.ownership.network import Network
from tests.model.ownership.oracle import Oracle
from tests.support.block_integrity import assert_whole
from tests.support.fake_clock import FakeClock

NUM_BLOCKS = 20
PREFILL, DECODE_A, DECODE_B = InstanceId("prefill"), InstanceId("decode-a"), InstanceId("decode-b")
PEERS = {
    PREFILL: PeerAddress(PREFILL, Epoch(2**30), "tcp://127.0.0.1:1"),
    DECODE_A: PeerAddress(DECODE_A, Epoch(2**32), "tcp://127.0.0.1:2"),
    DECODE_B: PeerAddress(DECODE_B, Epoch(2**31), "tcp://127.0.0.1:3"),
}
DECODES = (DECODE_A, DECODE_B)
_FIRST = tuple(range(100, 109))
_LONG = tuple(range(100, 115))
_SHARED = (*range(100, 104), *range(200, 207))
_NEXT_TURN = (*_FIRST, 909, 910, *range(300, 304))
_EDITED = (*_FIRST, 909, *range(400, 405))
TEXTS = [
    Text(salt, tokens)
    for tokens in (_FIRST, _LONG, _SHARED, _NEXT_TURN, _EDITED)
    for salt in ("red", "blue")
]

MAX_LIVE_REQUESTS = 6
"""Of one instance: more only wait."""
MODES = (Mode.PUSH, Mode.PUSH, Mode.PULL)
BUSIEST_FIRST = (PREFILL, PREFILL, DECODE_A, DECODE_A, DECODE_B)
CONVERSATIONS = [(first, second) for second in TEXTS[6:] for first in TEXTS[:2]]
"""First turns and second ones; of two tenants, so that not all belong together."""


@dataclasses.dataclass
class Handoff:
    """What the router knows of one transfer."""

    text: Text
    mode: Mode
    has_prefill: bool = False
    receivers: set[InstanceId] = dataclasses.field(default_factory=set)


class World(RuleBasedStateMachine):
    """A prefill instance and two decode instances, of which each holds what it has answered."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(1000.0)
        self.pools = {name: BlockPool(NUM_BLOCKS) for name in PEERS}
        memories = {name: Memory(name, pool) for name, pool in self.pools.items()}
        self.oracle = Oracle(memories)
        self.network = Network(self.clock, self.oracle, {})
        self.engines: dict[InstanceId, Engine] = {}
        for name, pool in self.pools.items():
            retention = RetentionTable(pool, self.clock, RetentionLimits(duration_s=60.0))
            self.network.planners[name] = Driven(
                name, PEERS[name].epoch, RenewingBlocks(pool, retention), self.clock
            )
            self.engines[name] = Engine(name, self.network, memories[name], retention)
        self.handoffs: dict[TransferId, Handoff] = {}
        self.num_requests = 0
        self.has_failed = False
        for name in DECODES:
            for asker, peer in ((name, PREFILL), (PREFILL, name)):
                self.network.contact(asker, PEERS[peer])
                self.settle(asker, peer)

    # -- arrivals -------------------------------------------------------------------------------
    def _has_room(self, *names: InstanceId) -> bool:
        return all(len(self.engines[name].requests) < MAX_LIVE_REQUESTS for name in names)

    def _add(self, name: InstanceId, request: Request) -> Request:
        peer = PEERS[PREFILL] if request.kind is Kind.DECODE else None
        self.engines[name].add(request, peer)
        return request

    def _begin_plain(self, name: InstanceId, text: Text, num_answers: int) -> Request:
        return self._add(name, Request(self._next_name(), text, num_answers=num_answers))

    def _begin_prefill(self, transfer_id: TransferId, holder: InstanceId | None) -> Request:
        handoff = self.handoffs[transfer_id]
        handoff.has_prefill = True
        request = Request(
            self._next_name(), handoff.text, Kind.PREFILL, handoff.mode, transfer_id,
            None if holder is None else PEERS[holder],
        )  # fmt: skip
        return self._add(PREFILL, request)

    def _begin_decode(self, transfer_id: TransferId, name: InstanceId, num_answers: int) -> Request:
        handoff = self.handoffs[transfer_id]
        handoff.receivers.add(name)
        request = Request(
            self._next_name(), handoff.text, Kind.DECODE, handoff.mode, transfer_id,
            num_answers=num_answers,
        )  # fmt: skip
        return self._add(name, request)

    def _next_name(self) -> str:
        self.num_requests += 1
        return f"request-{self.num_requests}"

    def _new_handoff(self, text: Text, mode: Mode) -> TransferId:
        transfer_id = TransferId(f"xfer-{len(self.handoffs)}")
        self.handoffs[transfer_id] = Handoff(text, mode)
        return transfer_id

    def _chosen(self, known: list[TransferId], dice: random.Random) -> TransferId:
        """Mostly the newest that is known, sometimes a new one."""
        if known and dice.random() < 0.75:
            return known[-1] if dice.random() < 0.8 else dice.choice(known)
        return self._new_handoff(dice.choice(TEXTS), dice.choice(MODES))

    def plain_arrives(self, dice: random.Random) -> None:
        name = dice.choice(BUSIEST_FIRST)
        if self._has_room(name):
            self._begin_plain(name, dice.choice(TEXTS), dice.randrange(4))

    def prefill_arrives(self, dice: random.Random) -> None:
        """Of a handoff that decode knows already, or of a new one."""
        if self._has_room(PREFILL):
            known = [t for t, h in self.handoffs.items() if not h.has_prefill]
            self._begin_prefill(self._chosen(known, dice), dice.choice([*DECODES, None, None]))

    def decode_arrives(self, dice: random.Random) -> None:
        """Of a handoff that prefill knows already, or another decode instance, or of a new one."""
        name = dice.choice(DECODES)
        if self._has_room(name):
            known = [t for t, h in self.handoffs.items() if name not in h.receivers]
            self._begin_decode(self._chosen(known, dice), name, dice.randrange(4))

    def _pick(
        self, dice: random.Random, names: Sequence[InstanceId], *phases: Phase
    ) -> tuple[Engine, Request] | None:
        found = [
            (self.engines[name], request)
            for name in names
            for request in self.engines[name].requests
            if request.phase in phases
        ]
        return dice.choice(found) if found else None

    # -- beginnings -----------------------------------------------------------------------------
    def compute(self, name: InstanceId, request: Request, num_tokens: int) -> None:
        """Let ``request`` have blocks and its next tokens, if it can."""
        engine = self.engines[name]
        if request.phase is Phase.WAITING:
            engine.admit(request)
        if request.phase is Phase.RUNNING and request.step_end is None and num_tokens:
            engine.begin_step(request, num_tokens)
        if request.step_end is not None:
            engine.end_step(request)

    def settle(
        self, asker: InstanceId, peer: InstanceId, dice: random.Random | None = None
    ) -> None:
        """All that is on the way between two instances arrives, some of it to come again."""
        session = self.network.sessions.get((asker, peer))
        while session is not None:
            arriving = [f for f in session.deliverable() if not f.is_copy]
            if not arriving:
                return
            session.requests.remove(arriving[0])
            is_register = isinstance(arriving[0].effect, Register)
            if dice is not None and is_register and dice.random() < 0.5:
                self.network.repeat(session, arriving[0])
            self.network.arrive(session, arriving[0])
            while session.answers:
                self.network.come_back(session, session.answers.pop(0))

    def a_push_gets_under_way(self, dice: random.Random) -> None:
        """Walks that end before a WRITE teach little."""
        name, num_tokens = dice.choice(DECODES), BLOCK_TOKENS * dice.randint(1, 4)
        if not self._has_room(PREFILL, name):
            return
        transfer_id = self._new_handoff(dice.choice(TEXTS), Mode.PUSH)
        decode = self._begin_decode(transfer_id, name, dice.randrange(4))
        prefill = self._begin_prefill(transfer_id, None)
        if dice.random() < 0.4:  # decode is late, or was chosen late
            self.compute(PREFILL, prefill, num_tokens)
            if dice.random() < 0.4 and prefill.phase is Phase.RUNNING:
                self.engines[PREFILL].preempt(prefill, is_told=dice.random() < 0.5)
                self.engines[PREFILL].grab(dice.randrange(NUM_BLOCKS))
        self.compute(name, decode, 0)
        self.settle(name, PREFILL, dice)
        self.compute(PREFILL, prefill, num_tokens)

    def a_read_gets_under_way(self, dice: random.Random) -> None:
        """Walks that end before a READ teach little."""
        name = dice.choice(DECODES)
        if not self._has_room(PREFILL, name):
            return
        transfer_id = self._new_handoff(dice.choice(TEXTS), Mode.PULL)
        self.compute(PREFILL, self._begin_prefill(transfer_id, None), 100)
        self.compute(name, self._begin_decode(transfer_id, name, dice.randrange(4)), 0)
        self.settle(name, PREFILL, dice)

    def a_read_back_gets_under_way(self, dice: random.Random) -> None:
        """One instance has answered a first turn, and another prefills the next."""
        name, (first, second) = dice.choice(DECODES), dice.choice(CONVERSATIONS)
        if not self._has_room(PREFILL, name):
            return
        answer = self._begin_plain(name, first, dice.randint(1, 3))
        for _ in range(4):
            self.compute(name, answer, 100)
        transfer_id = self._new_handoff(second, dice.choice(MODES))
        self.compute(PREFILL, self._begin_prefill(transfer_id, name), 0)
        self.settle(PREFILL, name, dice)

    # -- what is true always, and in the end ----------------------------------------------------
    def transfers_touch_their_own_only(self) -> None:
        now_s = self.clock.monotonic_s()
        for running in self.network.running:
            self.oracle.check(running.copy, now_s)

    def teardown(self) -> None:
        if self.has_failed:
            return  # what is left then says nothing
        network = self.network
        for engine in self.engines.values():
            engine.collect()
            for request in list(engine.requests):
                if request.step_end is not None:
                    engine.end_step(request)
            for request in list(engine.requests):
                engine.abort(request, is_told=False)
            engine.catch_up()
        for _ in range(4):
            while network.running:
                running = network.running[0]
                network.end(running, is_done=network.may_succeed(running))
                self._silence_links()
            for session in list(network.sessions.values()):
                network.lose(session)
            self._silence_links()
            self.clock.advance(10_000.0)
            for name in PEERS:
                network.call(name, "tick")
                self.engines[name].retention.expire()
        for name, pool in self.pools.items():
            assert_whole(pool)
            snapshot = network.call(name, "snapshot")
            assert dataclasses.replace(snapshot, outcomes={}) == ConnectorSnapshot()
            assert network.serving[name] == 0

    def _silence_links(self) -> None:
        while self.network.unquiet:
            self.network.go_quiet(self.network.unquiet[0])
