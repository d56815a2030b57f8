"""The walk over three instances: every call, message, copy, loss and pause is the walk's to choose."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvferry.blocks.integrity import assert_whole
from kvferry.blocks.pool import BlockPool
from kvferry.blocks.renewing import RenewingBlocks
from kvferry.blocks.retention import RetentionLimits, RetentionTable
from kvferry.protocol.ids import Epoch, InstanceId, TransferId
from kvferry.protocol.params import Mode, PeerAddress
from kvferry.testing.fake_clock import FakeClock
from tests.model.ownership.content import Memory, Text
from tests.model.ownership.driven import ConnectorSnapshot, Driven
from tests.model.ownership.engine import Engine, Kind, Phase, Request
from tests.model.ownership.network import Network
from tests.model.ownership.oracle import Oracle

NUM_BLOCKS = 14
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

MAX_LIVE_REQUESTS = 4
"""Of one instance: more only wait."""
MODES = (Mode.PUSH, Mode.PUSH, Mode.PULL)
FATES = (*("arrive",) * 40, *("repeat",) * 3, "lose")
BUSIEST_FIRST = (PREFILL, PREFILL, DECODE_A, DECODE_A, DECODE_B)
CHOICES = st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=16)
"""Each is one thing that happens, and the seed of its details."""


@dataclasses.dataclass
class Handoff:
    """What the router knows of one transfer."""

    text: Text
    mode: Mode
    has_prefill: bool = False
    receivers: set[InstanceId] = dataclasses.field(default_factory=set)


class OwnershipWalk(RuleBasedStateMachine):
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

    @rule(choices=CHOICES)
    def things_happen(self, choices: list[int]) -> None:
        """Mostly what is most of an instance's life, and now and then what should not be."""
        for choice in choices:
            dice = random.Random(choice)
            able = [(act, weight) for act, weight, can in ACTIONS if can(self)]
            (act,) = dice.choices([a for a, _ in able], [w for _, w in able])
            note(f"{act.__name__} {choice}")
            act(self, dice)
            self.transfers_touch_their_own_only()

    # -- arrivals -------------------------------------------------------------------------------
    def _add(self, name: InstanceId, request: Request) -> None:
        if len(self.engines[name].requests) < MAX_LIVE_REQUESTS:
            peer = PEERS[PREFILL] if request.kind is Kind.DECODE else None
            self.engines[name].add(request, peer)

    def _new_name(self) -> str:
        self.num_requests += 1
        return f"request-{self.num_requests}"

    def plain_arrives(self, dice: random.Random) -> None:
        request = Request(self._new_name(), dice.choice(TEXTS), num_answers=dice.randrange(4))
        self._add(dice.choice(BUSIEST_FIRST), request)

    def prefill_arrives(self, dice: random.Random) -> None:
        """Of a handoff that decode knows already, or of a new one."""
        transfer_id = self._chosen([t for t, h in self.handoffs.items() if not h.has_prefill], dice)
        handoff = self.handoffs[transfer_id]
        handoff.has_prefill = True
        history = PEERS[dice.choice(DECODES)] if dice.random() < 0.5 else None
        self._add(
            PREFILL,
            Request(
                self._new_name(), handoff.text, Kind.PREFILL, handoff.mode, transfer_id, history
            ),
        )

    def decode_arrives(self, dice: random.Random) -> None:
        """Of a handoff that prefill knows already, another decode instance even, or of a new one."""
        name = dice.choice(DECODES)
        known = [t for t, h in self.handoffs.items() if name not in h.receivers]
        transfer_id = self._chosen(known, dice)
        handoff = self.handoffs[transfer_id]
        handoff.receivers.add(name)
        request = Request(
            self._new_name(), handoff.text, Kind.DECODE, handoff.mode, transfer_id,
            num_answers=dice.randrange(4),
        )  # fmt: skip
        self._add(name, request)

    def _chosen(self, known: list[TransferId], dice: random.Random) -> TransferId:
        """Mostly the newest that is known, sometimes a new one."""
        if known and dice.random() < 0.75:
            return known[-1] if dice.random() < 0.8 else dice.choice(known)
        transfer_id = TransferId(f"xfer-{len(self.handoffs)}")
        self.handoffs[transfer_id] = Handoff(dice.choice(TEXTS), dice.choice(MODES))
        return transfer_id

    # -- engines --------------------------------------------------------------------------------
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

    def engine_works(self, dice: random.Random) -> None:
        """It admits what waits, begins a step of what has its blocks, or completes one."""
        picked = self._pick(dice, list(PEERS), Phase.WAITING, Phase.RUNNING)
        if picked is None:
            return
        engine, request = picked
        if request.phase is Phase.WAITING:
            engine.admit(request)
        elif request.step_end is not None:
            engine.end_step(request)
        else:
            engine.begin_step(request, dice.choice([1, 3, 4, 4, 8, 16]))
            if request.step_end is not None and dice.random() < 0.6:
                engine.end_step(request)

    def engine_preempts(self, dice: random.Random) -> None:
        picked = self._pick(dice, list(PEERS), Phase.RUNNING, Phase.RECEIVING)
        if picked is not None and picked[1].step_end is None:
            engine, request = picked
            engine.preempt(request, is_told=dice.random() < 0.5)
            engine.grab(dice.randrange(4))

    def client_leaves(self, dice: random.Random) -> None:
        picked = self._pick(dice, list(PEERS), Phase.WAITING, Phase.RUNNING, Phase.RECEIVING)
        if picked is not None and picked[1].step_end is None:
            picked[0].abort(picked[1], is_told=dice.random() < 0.5)

    def blocks_are_given_back(self, dice: random.Random) -> None:
        picked = self._pick(dice, DECODES, Phase.RECEIVING)
        if picked is not None and picked[1].mode is Mode.PUSH:
            engine, request = picked
            engine.give_back(request)
            engine.grab(dice.randrange(4))

    def engine_catches_up(self, dice: random.Random) -> None:
        self.engines[dice.choice(BUSIEST_FIRST)].catch_up()

    def engine_collects(self, dice: random.Random) -> None:
        self.engines[dice.choice(BUSIEST_FIRST)].collect()

    def others_work(self, dice: random.Random) -> None:
        self.engines[dice.choice(BUSIEST_FIRST)].grab(dice.randint(1, NUM_BLOCKS))

    def cache_is_reset(self, dice: random.Random) -> None:
        self.engines[dice.choice(BUSIEST_FIRST)].reset()

    def pool_is_short(self, dice: random.Random) -> None:
        self.network.call(dice.choice(BUSIEST_FIRST), "give_up_oldest", dice.randint(1, 4))

    # -- what lies between ----------------------------------------------------------------------
    def request_travels(self, dice: random.Random) -> None:
        session, flight = dice.choice(self.network.on_the_way())
        fate = dice.choice(FATES)
        if fate != "repeat" or not session.may_be_repeated(flight):
            session.requests.remove(flight)
        if fate != "lose":
            self.network.arrive(session, flight)

    def answer_travels(self, dice: random.Random) -> None:
        session, answer = dice.choice(self.network.on_the_way_back())
        fate = dice.choice(FATES)
        if fate != "repeat" or answer.flight is not None:
            session.answers.remove(answer)
        if fate != "lose":
            self.network.come_back(session, answer)

    def block_is_copied(self, dice: random.Random) -> None:
        running = dice.choice(self.network.running)
        if running.copy.left:
            self.oracle.land(running.copy, dice.randrange(len(running.copy.left)))

    def transfer_ends(self, dice: random.Random) -> None:
        running = dice.choice(self.network.running)
        is_done = self.network.may_succeed(running) and dice.random() < 0.9
        is_corrupt = is_done and dice.random() < 0.05
        self.network.end(running, is_done=is_done, is_corrupt=is_corrupt)

    def peer_is_lost(self, dice: random.Random) -> None:
        self.network.lose(dice.choice(list(self.network.sessions.values())))

    def link_goes_quiet(self, dice: random.Random) -> None:
        self.network.go_quiet(dice.choice(self.network.unquiet))

    def time_passes(self, dice: random.Random) -> None:
        self.clock.advance(dice.choice([*(0.1,) * 6, *(1.0,) * 4, 4.9, 6.0, 11.0, 31.0]))
        for session in self.network.overdue():
            if dice.random() < 0.5:
                self.network.lose(session)
        for name in PEERS:
            if dice.random() < 0.5:
                self.network.call(name, "tick")
                self.engines[name].retention.expire()

    def all_goes_well_for_a_while(self, dice: random.Random) -> None:
        """Walks that never get to the end of a transfer teach little."""
        network = self.network
        for _ in range(dice.randint(5, 40)):
            if flights := network.on_the_way():
                session, flight = flights[0]
                session.requests.remove(flight)
                network.arrive(session, flight)
            elif answers := network.on_the_way_back():
                session, answer = answers[0]
                session.answers.remove(answer)
                network.come_back(session, answer)
            elif network.running:
                running = network.running[0]
                network.end(running, is_done=network.may_succeed(running))
            else:
                for name in PEERS:
                    self.engines[name].collect()
                self.engine_works(dice)

    def transfers_touch_their_own_only(self) -> None:
        now_s = self.clock.monotonic_s()
        for running in self.network.running:
            self.oracle.check(running.copy, now_s)

    def teardown(self) -> None:
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


Can = Callable[[OwnershipWalk], object]
_W = OwnershipWalk
ACTIONS: list[tuple[Callable[[OwnershipWalk, random.Random], None], float, Can]] = [
    (_W.plain_arrives, 2, bool),
    (_W.prefill_arrives, 5, bool),
    (_W.decode_arrives, 5, bool),
    (_W.engine_works, 24, bool),
    (_W.engine_preempts, 2, bool),
    (_W.client_leaves, 1, bool),
    (_W.blocks_are_given_back, 1, bool),
    (_W.engine_catches_up, 1.5, bool),
    (_W.engine_collects, 6, bool),
    (_W.others_work, 3, bool),
    (_W.cache_is_reset, 0.3, bool),
    (_W.pool_is_short, 0.3, bool),
    (_W.request_travels, 18, lambda walk: walk.network.on_the_way()),
    (_W.answer_travels, 18, lambda walk: walk.network.on_the_way_back()),
    (_W.block_is_copied, 5, lambda walk: walk.network.running),
    (_W.transfer_ends, 7, lambda walk: walk.network.running),
    (_W.peer_is_lost, 0.3, lambda walk: walk.network.sessions),
    (_W.link_goes_quiet, 2, lambda walk: walk.network.unquiet),
    (_W.time_passes, 2, bool),
    (_W.all_goes_well_for_a_while, 0.5, bool),
]
"""What may happen, how often next to the others, and when it can."""
