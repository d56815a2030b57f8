"""Effects in the order in which they were decided, whoever decides; what has no rule."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvferry.connector.effects import ContactPeer, CountDropped, PostWrite
from kvferry.connector.events import AcquireAnswered
from kvferry.connector.ports import PromptIdentity
from kvferry.errors import LocalProtocolError, RequestError
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.keys import UserKeyFile
from kvferry.protocol.params import PeerAddress
from tests.unit.connector.conftest import PEER, READER, TRANSFER, World, grant, make_world
from tests.unit.connector.test_push_sender import PROMPT, begin, make_register

WAIT_S = 10.0


def test_nobody_decides_before_the_effects_of_an_earlier_decision_are_in() -> None:
    """An engine's thread is in the midst of a decision as the mover's has another."""
    is_deciding, may_end = threading.Event(), threading.Event()

    def digest_slowly(blocks: Sequence[BlockNumber]) -> tuple[bytes, ...]:
        is_deciding.set()
        assert may_end.wait(WAIT_S)
        return (b"d" * 32,) * len(blocks)

    world = make_world(digests_of=digest_slowly)
    planner, other = world.planner.planner, TransferId("other")
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    first = threading.Thread(target=planner.advance_send, args=(TRANSFER, blocks, 32))
    second = threading.Thread(target=planner.begin_receive, args=(other, PEER, PROMPT))
    first.start()
    assert is_deciding.wait(WAIT_S)
    second.start()
    may_end.set()
    first.join(WAIT_S)
    second.join(WAIT_S)
    effects = []
    while (effect := planner.take_effect()) is not None:
        effects.append(type(effect).__name__)
    assert effects == ["Notify", "PostWrite", "ContactPeer"]


def test_the_mover_is_woken_by_every_call_of_an_engine(world: World) -> None:
    woken: list[None] = []
    world.planner.planner.wake = lambda: woken.append(None)
    blocks = world.pool.allocate(4)
    world.planner.begin_send(TRANSFER, PROMPT)
    world.planner.advance_send(TRANSFER, blocks, 0)  # leads to nothing
    assert len(woken) == 2
    with pytest.raises(RequestError):
        world.planner.begin_send(TRANSFER, PROMPT)
    assert len(woken) == 3


def test_a_decision_that_fails_leaves_the_rest_as_it_was(world: World) -> None:
    unreferenced = [BlockNumber(1)]
    with pytest.raises(LocalProtocolError):
        world.planner.offer(TRANSFER, unreferenced, PromptIdentity(16, b"d" * 32))
    world.assert_idle()
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    effects = world.planner.advance_send(TRANSFER, blocks, 32)
    assert any(isinstance(effect, PostWrite) for effect in effects)


def test_what_a_peer_says_where_no_rule_is_is_counted(world: World) -> None:
    planner = world.planner.planner
    blocks = world.pool.allocate(3)
    world.planner.begin_receive(TRANSFER, PEER, PROMPT)
    world.planner.receive(TRANSFER, blocks, 0)
    world.planner.handle(AcquireAnswered(TRANSFER, 100.0, grant(1, 2, 3)))
    planner.handle(AcquireAnswered(TRANSFER, 100.0, grant(4, 5, 6)))
    assert planner.take_effect() == CountDropped("pull receiver", "granted", "reading")
    assert planner.take_effect() is None


def test_what_an_engine_asks_for_where_no_rule_is_raises(world: World) -> None:
    blocks = world.pool.allocate(3)
    world.planner.begin_receive(TRANSFER, PEER, PROMPT)
    world.planner.receive(TRANSFER, blocks, 0)
    with pytest.raises(LocalProtocolError, match="under way"):
        world.planner.receive(TRANSFER, blocks, 0)
    with pytest.raises(LocalProtocolError, match="not begun"):
        world.planner.receive(TransferId("other"), blocks, 0)


@pytest.mark.parametrize(
    ("key", "is_allowed"),
    [
        ({}, False),
        ({"cluster_key": b"k" * 32, "user_key_file": UserKeyFile("/home/a/key", 7, "id")}, False),
        ({"cluster_key": b"k" * 32}, True),
    ],
)
def test_peers_beyond_loopback_take_a_clusters_key(
    key: dict[str, object], is_allowed: bool
) -> None:
    world = make_world(**key)  # type: ignore[arg-type]
    far = PeerAddress(InstanceId("far"), Epoch(1), "tcp://192.0.2.1:5555")
    if is_allowed:
        assert world.planner.contact(far) == [ContactPeer(far)]
        assert ContactPeer(far) in world.planner.begin_receive(TRANSFER, far, PROMPT)
        return
    with pytest.raises(RequestError, match="needs a cluster key") as refusal:
        world.planner.contact(far)
    assert refusal.value.code == "peer_not_allowed"
    with pytest.raises(RequestError, match="needs a cluster key"):
        world.planner.begin_receive(TRANSFER, far, PROMPT)
    world.assert_idle()
