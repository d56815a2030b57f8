"""The walk over three instances: each call, message, copy, loss and pause is its to choose."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvferry.protocol.params import Mode
from tests.model.ownership.engine import Phase as RequestPhase
from tests.model.ownership.world import BUSIEST_FIRST, DECODES, NUM_BLOCKS, PEERS, PREFILL, World

SETTINGS = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
FATES = (*("arrive",) * 40, *("repeat",) * 10, "lose")


class OwnershipWalk(World):
    """A prefill instance and two decode instances, of which each holds what it has answered."""

    @rule(seed=st.integers(0, 2**24 - 1), num_things=st.integers(1, 32))
    def things_happen(self, seed: int, num_things: int) -> None:
        """Mostly what is most of an instance's life, and now and then what should not be."""
        dice = random.Random(seed)
        for _ in range(num_things):
            able = [(act, weight) for act, weight, can in ACTIONS if can(self)]
            (act,) = dice.choices([a for a, _ in able], [w for _, w in able])
            note(act.__name__)
            self.has_failed = True
            act(self, dice)
            self.transfers_touch_their_own_only()
            self.has_failed = False

    # -- engines --------------------------------------------------------------------------------
    def engine_works(self, dice: random.Random) -> None:
        """It admits what waits, begins a step of what has its blocks, or completes one."""
        picked = self._pick(dice, list(PEERS), RequestPhase.WAITING, RequestPhase.RUNNING)
        if picked is None:
            return
        engine, request = picked
        if request.phase is RequestPhase.WAITING:
            engine.admit(request)
        elif request.step_end is not None:
            engine.end_step(request)
        else:
            engine.begin_step(request, dice.choice([1, 3, 4, 4, 8, 16]))
            if request.step_end is not None and dice.random() < 0.6:
                engine.end_step(request)

    def engine_preempts(self, dice: random.Random) -> None:
        picked = self._pick(dice, list(PEERS), RequestPhase.RUNNING, RequestPhase.RECEIVING)
        if picked is not None and picked[1].step_end is None:
            engine, request = picked
            engine.preempt(request, is_told=dice.random() < 0.5)
            engine.grab(dice.randrange(4))

    def client_leaves(self, dice: random.Random) -> None:
        picked = self._pick(
            dice, list(PEERS), RequestPhase.WAITING, RequestPhase.RUNNING, RequestPhase.RECEIVING
        )
        if picked is not None and picked[1].step_end is None:
            picked[0].abort(picked[1], is_told=dice.random() < 0.5)

    def blocks_are_given_back(self, dice: random.Random) -> None:
        picked = self._pick(dice, DECODES, RequestPhase.RECEIVING)
        if picked is not None and picked[1].mode is Mode.PUSH:
            engine, request = picked
            engine.give_back(request)
            engine.grab(dice.randrange(4))

    def a_push_is_registered_anew(self, dice: random.Random) -> None:
        """Decode needed the blocks for a moment; it has others now."""
        known = {r.transfer_id for r in self.engines[PREFILL].requests}
        pushes = [
            (name, request)
            for name in DECODES
            for request in self.engines[name].requests
            if request.phase is RequestPhase.RECEIVING and request.transfer_id in known
        ]
        if not pushes:
            return
        name, request = dice.choice(pushes)
        self.settle(name, PREFILL, dice)
        if request.phase is RequestPhase.RECEIVING and request.mode is Mode.PUSH:
            self.engines[name].give_back(request)
        self.compute(name, request, 0)
        self.settle(name, PREFILL, dice)

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
        session.requests.remove(flight)
        if fate == "repeat":
            self.network.repeat(session, flight)
        if fate != "lose":
            self.network.arrive(session, flight)

    def request_comes_again(self, dice: random.Random) -> None:
        session, flight = dice.choice(self.network.on_the_way(copies=True))
        session.requests.remove(flight)
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
        self.network.end(running, is_done=is_done)

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

    def an_instance_stands_still(self, dice: random.Random) -> None:
        """It does not notice how time passes; others do, and use what was kept for it. Then it goes
        on where it was, perhaps with the end of its transfers."""
        still = dice.choice([dice.choice(self.network.running).poster, *PEERS])
        for seconds in dice.choice([(5.2,), (6.0, 6.0), (6.0, 6.0, 21.0)]):
            self.clock.advance(seconds)
            for name in PEERS:
                if name != still:
                    self.network.call(name, "tick")
                    self.engines[name].grab(NUM_BLOCKS)
        for running in [r for r in self.network.running if r.poster == still]:
            if dice.random() < 0.5 and running in self.network.running:
                self.network.end(running, is_done=self.network.may_succeed(running))

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


Can = Callable[[OwnershipWalk], object]
_W = OwnershipWalk
ACTIONS: list[tuple[Callable[[OwnershipWalk, random.Random], None], float, Can]] = [
    (_W.a_push_gets_under_way, 3, bool),
    (_W.a_read_gets_under_way, 1, bool),
    (_W.a_read_back_gets_under_way, 1, bool),
    (_W.plain_arrives, 2, bool),
    (_W.prefill_arrives, 4, bool),
    (_W.decode_arrives, 4, bool),
    (_W.engine_works, 32, bool),
    (_W.engine_preempts, 2, bool),
    (_W.client_leaves, 1, bool),
    (_W.blocks_are_given_back, 1.5, bool),
    (_W.a_push_is_registered_anew, 3, bool),
    (_W.engine_catches_up, 1.5, bool),
    (_W.engine_collects, 6, bool),
    (_W.others_work, 3, bool),
    (_W.cache_is_reset, 0.3, bool),
    (_W.pool_is_short, 0.3, bool),
    (_W.request_travels, 18, lambda walk: walk.network.on_the_way()),
    (_W.request_comes_again, 5, lambda walk: walk.network.on_the_way(copies=True)),
    (_W.answer_travels, 18, lambda walk: walk.network.on_the_way_back()),
    (_W.block_is_copied, 5, lambda walk: walk.network.running),
    (_W.transfer_ends, 7, lambda walk: walk.network.running),
    (_W.peer_is_lost, 0.3, lambda walk: walk.network.sessions),
    (_W.link_goes_quiet, 2, lambda walk: walk.network.unquiet),
    (_W.time_passes, 2, bool),
    (_W.an_instance_stands_still, 1, lambda walk: walk.network.running),
    (_W.all_goes_well_for_a_while, 0.5, bool),
]
"""What may happen, how often next to the others, and when it can."""
