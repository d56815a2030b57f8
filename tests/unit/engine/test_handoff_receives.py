"""What peers send is never lost on its way to its request, however much comes at once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvferry.blocks.pool import BlockPool
from kvferry.connector.ports import FirstTokenArrival, PrefillEnd, ReceiveOutcome, ReceiveResult
from kvferry.engine.handoff import Receives
from kvferry.engine.live_request import LiveRequest
from kvferry.engine.request import EngineRequest
from kvferry.errors import RequestError
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.protocol.params import FirstToken, KvTransferParams, Mode, Role
from tests.unit.engine.rig import PEER, FakeConnector, Rig
from tests.unit.engine.test_handoff import random_prompt, report_of
from tests.unit.engine.test_live_request import make_live

NUM_MANY = 1500
RECEIVING = KvTransferParams(
    transfer_id=TransferId("x"), role=Role.DECODE, mode=Mode.PUSH, peer=PEER
)


def transfer_of(number: int) -> KvTransferParams:
    return msgspec.structs.replace(RECEIVING, transfer_id=TransferId(f"push-{number}"))


class World:
    """The engine's receives over a connector that a test moves by hand."""

    def __init__(self) -> None:
        self.connector = FakeConnector(BlockPool(1))
        self.receives = Receives(self.connector)

    def begin(self, number: int) -> LiveRequest:
        transfer = transfer_of(number)
        request = EngineRequest(
            request_id=RequestId(f"r{number}"), prompt_token_ids=(1, 2), transfer=transfer
        )
        live = make_live(2, request=request)
        self.receives.begin(live)
        return live

    def tell(self, number: int) -> None:
        transfer_id = transfer_of(number).transfer_id
        end = PrefillEnd(FirstToken(number, 0))
        self.connector.first_tokens.append(FirstTokenArrival(transfer_id, end))
        self.connector.results.append(ReceiveResult(transfer_id, ReceiveOutcome.UNREACHABLE))

    def taken(self) -> tuple[list[str], list[str]]:
        """Whose tokens and whose results are taken now."""
        tokens, results = self.receives.take()
        for request, end in tokens:
            assert request.request.request_id == f"r{end.first_token.token_id}"
        for request, result in results:
            assert request.transfer_as(Role.DECODE).transfer_id == result.transfer_id  # type: ignore[union-attr]
        return (
            [request.request.request_id for request, _ in tokens],
            [request.request.request_id for request, _ in results],
        )


@pytest.fixture
def world() -> World:
    return World()


EVERYBODY = [f"r{number}" for number in range(NUM_MANY)]


def test_many_at_once_for_requests_in_service(world: World) -> None:
    for number in range(NUM_MANY):
        world.receives.add(world.begin(number))
    for number in range(NUM_MANY):
        world.tell(number)
    assert world.taken() == (EVERYBODY, EVERYBODY)
    assert world.taken() == ([], [])


def test_many_at_once_for_requests_on_their_way(world: World) -> None:
    lives = [world.begin(number) for number in range(NUM_MANY)]
    for number in range(NUM_MANY):
        world.tell(number)
    assert world.taken() == ([], [])
    for live in lives:
        world.receives.add(live)
    assert world.taken() == (EVERYBODY, EVERYBODY)


def test_what_came_for_an_ended_transfer_is_not_for_the_next_under_its_id(world: World) -> None:
    for end_early in (True, False):
        live = world.begin(1)
        world.tell(1)
        assert world.taken() == ([], [])
        if end_early:
            world.receives.decline(live)
        else:
            world.receives.end(live)
        world.connector.begun.clear()
        next_one = world.begin(1)
        world.receives.add(next_one)
        assert world.taken() == ([], [])
        world.receives.decline(next_one)
        world.connector.begun.clear()


def test_what_nobody_has_begun_is_not_kept(world: World) -> None:
    world.tell(1)
    assert world.taken() == ([], [])
    world.receives.add(world.begin(1))
    assert world.taken() == ([], [])


def test_an_id_in_use_takes_nothing_from_who_has_it(world: World) -> None:
    live = world.begin(1)
    with pytest.raises(RequestError, match="in use"):
        world.begin(1)
    world.tell(1)
    assert world.taken() == ([], [])
    world.receives.add(live)
    assert world.taken() == (["r1"], ["r1"])


def test_every_request_of_a_lost_peer_ends(tiny_model_dir: Path) -> None:
    with Rig(tiny_model_dir, recompute_threshold_tokens=0) as rig:
        answers = [
            rig.submit(random_prompt(20), transfer=transfer_of(number), max_tokens=1)
            for number in range(NUM_MANY)
        ]
        rig.connector.wait_receive(transfer_of(0).transfer_id)
        with rig.connector.changed:
            for receive in rig.connector.receives.values():
                rig.pool.drop(receive.blocks)
            everybody = [transfer_of(number).transfer_id for number in range(NUM_MANY)]
            rig.connector.refused.update(everybody)
            rig.connector.results += [
                ReceiveResult(transfer_id, ReceiveOutcome.UNREACHABLE) for transfer_id in everybody
            ]
        rig.engine.wake()
        for answer in answers:
            assert report_of(answer.wait()).receive_outcome == "unreachable"
