"""Transfers that are verified: what was computed is compared with what has come, in all modes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvferry.connector.effects import CountReceive
from kvferry.connector.events import AcquireAnswered, Noticed, ReadEnded, ReadStatus
from kvferry.connector.exchange import BlockDigester
from kvferry.connector.ports import ReceiveOutcome
from kvferry.errors import ConfigError
from kvferry.protocol.ids import BlockNumber
from kvferry.protocol.messages import Granted, Written
from kvferry.protocol.params import Mode
from kvferry.transport.base import MemoryKind, MemoryRegion, address_of
from tests.unit.connector.conftest import (
    PEER,
    READER,
    TRANSFER,
    World,
    grant,
    make_acquire,
    make_world,
)
from tests.unit.connector.conftest import PROMPT as WANTED
from tests.unit.connector.test_push_sender import (
    END,
    PROMPT,
    begin,
    complete,
    ended,
    make_register,
    notices,
    writes,
)


class Memory:
    """What is in each block, as a number that its digest is made of."""

    def __init__(self) -> None:
        self.content = dict.fromkeys(range(64), 0)

    def digests(self, blocks: Sequence[BlockNumber]) -> tuple[bytes, ...]:
        return tuple(bytes([self.content[block]]) * 32 for block in blocks)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def verifying(memory: Memory) -> World:
    return make_world(digests_of=memory.digests)


def counted(world: World) -> list[tuple[int, int]]:
    planner, pairs = world.planner.planner, []
    while (effect := planner.take_effect()) is not None:
        if isinstance(effect, CountReceive):
            pairs.append((effect.num_verified, effect.num_unverified))
    return pairs


def test_a_push_is_compared_with_what_was_ready_not_with_what_was_posted(
    verifying: World, memory: Memory
) -> None:
    blocks = begin(verifying)
    memory.content.update(dict.fromkeys(blocks, 1))
    verifying.planner.advance_send(TRANSFER, blocks, 48)
    memory.content[blocks[1]] = 9  # somebody else writes to it before it is posted
    register = make_register(first_block=1, changes={"want_block_digests": True})
    _, effects = verifying.planner.answer(READER, register)
    (write,) = writes(effects)
    verifying.planner.handle(ended(write))
    (last,) = writes(complete(verifying, blocks))
    (written,) = notices(verifying.planner.handle(ended(last)))
    assert isinstance(written, Written)
    assert [digest[0] for digest in written.block_digests] == [1, 1, 1]
    verifying.assert_idle()


def test_a_push_that_was_preempted_is_compared_with_the_blocks_that_were_written(
    verifying: World, memory: Memory
) -> None:
    blocks = begin(verifying)
    memory.content.update(dict.fromkeys(blocks, 1))
    register = make_register(changes={"want_block_digests": True})
    verifying.planner.answer(READER, register)
    (first,) = writes(verifying.planner.advance_send(TRANSFER, blocks, 32))
    verifying.planner.pause_send(TRANSFER)
    verifying.planner.handle(ended(first))
    verifying.pool.drop(blocks)
    others = verifying.pool.allocate(4)
    memory.content.update(dict.fromkeys(others, 2))
    (second,) = writes(complete(verifying, others))
    (written,) = notices(verifying.planner.handle(ended(second)))
    assert isinstance(written, Written)
    assert [digest[0] for digest in written.block_digests] == [1, 1, 2, 2]
    verifying.assert_idle()


@pytest.mark.parametrize("wants", [True, False])
def test_digests_are_told_to_who_wants_them_where_they_are_known(world: World, wants: bool) -> None:
    register = make_register(changes={"want_block_digests": wants})
    world.planner.answer(READER, register)
    (write,) = writes(complete(world, begin(world)))
    (written,) = notices(world.planner.handle(ended(write)))
    assert isinstance(written, Written)
    assert written.block_digests == ()


@pytest.mark.parametrize(
    ("told", "outcome", "verified"),
    [
        ((3, 3, 3), ReceiveOutcome.RECEIVED, (3, 0)),
        ((3, 4, 3), ReceiveOutcome.CORRUPT, (3, 0)),
        ((), ReceiveOutcome.RECEIVED, (0, 3)),
    ],
)
def test_what_was_written_is_compared(
    verifying: World,
    memory: Memory,
    told: tuple[int, ...],
    outcome: ReceiveOutcome,
    verified: tuple[int, int],
) -> None:
    planner = verifying.planner.planner
    verifying.planner.begin_receive(TRANSFER, PEER, WANTED, mode=Mode.PUSH)
    blocks = verifying.pool.allocate(3)
    verifying.planner.receive(TRANSFER, blocks, 0)
    memory.content.update(dict.fromkeys(blocks, 3))
    written = Written(
        TRANSFER,
        0,
        0,
        3,
        WANTED.num_tokens,
        END.first_token,
        WANTED.digest,
        block_digests=tuple(bytes([n]) * 32 for n in told),
    )
    planner.handle(Noticed(TRANSFER, PEER, written))
    assert counted(verifying) == [verified]
    (result,) = verifying.planner.take_results()
    assert result.outcome is outcome
    verifying.pool.drop(blocks)
    verifying.assert_idle()


@pytest.mark.parametrize("is_intact", [True, False])
def test_what_was_read_is_compared(verifying: World, memory: Memory, is_intact: bool) -> None:
    verifying.planner.begin_receive(TRANSFER, PEER, PROMPT)
    blocks = verifying.pool.allocate(3)
    verifying.planner.receive(TRANSFER, blocks, 0)
    reply = msgspec.structs.replace(grant(7, 8, 9), block_digests=(b"\5" * 32,) * 3)
    verifying.planner.handle(AcquireAnswered(TRANSFER, 100.0, reply))
    memory.content.update(dict.fromkeys(blocks, 5 if is_intact else 6))
    verifying.planner.handle(ReadEnded(TRANSFER, ReadStatus.DONE, 100.0, 300))
    (result,) = verifying.planner.take_results()
    assert result.outcome is (ReceiveOutcome.RECEIVED if is_intact else ReceiveOutcome.CORRUPT)
    verifying.pool.drop(blocks)
    verifying.assert_idle()


def test_who_reads_is_told_the_digests_of_its_blocks(verifying: World, memory: Memory) -> None:
    blocks = verifying.pool.allocate(4)
    memory.content.update({block: n for n, block in enumerate(blocks, 1)})
    verifying.planner.offer(TRANSFER, blocks, PROMPT)
    verifying.pool.drop(blocks)
    changes = {"num_tokens": PROMPT.num_tokens, "digest": PROMPT.digest, "first_block": 1}
    acquire = make_acquire(want_block_digests=True, **changes)
    granted, _ = verifying.planner.answer(READER, acquire)
    assert isinstance(granted, Granted)
    assert [digest[0] for digest in granted.block_digests] == [2, 3, 4]


def test_a_digest_is_of_all_runs_of_a_block() -> None:
    memory = memoryview(bytearray(range(64)))
    start = address_of(memory)
    runs = [MemoryRegion(start, 4, 8, 4), MemoryRegion(start + 32, 8, 8, 4)]
    digester = BlockDigester(runs)
    before = digester.digests([BlockNumber(1), BlockNumber(2)])
    memory[8 + 5] = 0  # between the runs of the first region
    assert digester.digests([BlockNumber(1), BlockNumber(2)]) == before
    memory[32 + 8] = 0  # in the second run of block 1
    after = digester.digests([BlockNumber(1), BlockNumber(2)])
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)


def test_memory_of_a_device_is_refused() -> None:
    on_device = MemoryRegion(4096, 4, 4, 4, MemoryKind.VRAM)
    with pytest.raises(ConfigError, match="--verify-transfers"):
        BlockDigester([on_device])
