"""Read-backs with a peer that says whatever it likes: nothing breaks, and nothing is lost."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.effects import PostRead
from kvferry.connector.events import AcquireAnswered, ReadEnded, ReadStatus
from kvferry.connector.ports import HistoryRequest, ReceiveOutcome
from kvferry.protocol.hashing import partial_content
from kvferry.protocol.ids import BlockHash, BlockNumber
from kvferry.protocol.messages import Granted, PartialBlock
from tests.unit.connector.conftest import PEER, grant, make_world
from tests.unit.connector.test_history import TOKENS, ask, fill, hashes_of, release
from tests.unit.connector.test_history_partials import end_in

FULL = hashes_of(count=4)
PARTIALS = [
    partial_content(FULL[parent], TOKENS[16 * (parent + 1) :][:count])
    for parent, count in ((0, 3), (1, 1), (1, 15), (3, 7))
]
KNOWN = [*FULL, *(content.block_hash for content in PARTIALS)]
UNKNOWN = BlockHash(b"u" * 32)

block_numbers = st.integers(0, 20) | st.just(2**31 - 1)
partial_blocks = st.builds(
    PartialBlock,
    block=block_numbers.map(BlockNumber),
    num_tokens=st.integers(1, 17) | st.just(2**31 - 1),
    block_hash=st.sampled_from([*KNOWN, UNKNOWN]),
)


@settings(max_examples=300)
@given(
    hashes=st.lists(st.sampled_from([*KNOWN, UNKNOWN]), min_size=1, max_size=10),
    num_before=st.integers(0, 8),
)
def test_a_reader_may_ask_for_anything(hashes: list[BlockHash], num_before: int) -> None:
    world = make_world(num_blocks=16, max_history_share=0.5)
    fill(world, FULL)
    for content in PARTIALS:
        end_in(world, content)
    reply, _ = ask(world, hashes, want_partials=True, min_blocks=num_before)
    if isinstance(reply, Granted):
        leased = [*reply.blocks, *(partial.block for partial in reply.partials)]
        assert len(set(leased)) == len(leased) <= 8
        assert [world.pool.dump().hash_by_block.get(b) for b in reply.blocks] == hashes[
            : len(reply.blocks)
        ]
        assert all(world.pool.num_references(block) == 1 for block in leased)
    release(world)
    world.assert_idle()


@settings(max_examples=300)
@given(
    granted=st.lists(block_numbers, max_size=8),
    partials=st.lists(partial_blocks, max_size=8),
    num_digests=st.integers(0, 16),
    num_blocks=st.integers(6, 7),
    status=st.sampled_from(ReadStatus),
)
def test_a_holder_may_grant_anything(
    granted: list[int],
    partials: list[PartialBlock],
    num_digests: int,
    num_blocks: int,
    status: ReadStatus,
) -> None:
    world = make_world()
    blocks = world.pool.allocate(num_blocks)
    tokens = TOKENS[: 96 if num_blocks == 6 else 98]
    history_request = HistoryRequest(tuple(hashes_of()), tuple(blocks), tokens, 16, 4)
    name, _ = world.planner.read_history(PEER, history_request)
    digests = tuple(bytes([number]) * 32 for number in range(num_digests))
    reply = msgspec.structs.replace(
        grant(*granted), partials=tuple(partials), block_digests=digests
    )
    effects = world.planner.handle(AcquireAnswered(name, 100.0, reply))
    reads = [effect for effect in effects if isinstance(effect, PostRead)]
    for read in reads:
        count = len(read.remote_blocks)
        assert read.local_blocks == tuple(blocks[:count])
        assert list(read.remote_blocks[: len(granted)]) == granted
        assert count - len(granted) in (0, 1)
        world.planner.handle(ReadEnded(name, status, 101.0, 600))
    (result,) = world.planner.take_results()
    if result.outcome is ReceiveOutcome.RECEIVED:
        assert 1 <= len(granted) <= 6
        end = 16 * len(granted) + result.num_partial_tokens
        assert end <= len(tokens), "the last token is always computed here"
        if result.num_partial_tokens:
            own = partial_content(hashes_of()[len(granted) - 1], tokens[16 * len(granted) : end])
            assert own.block_hash in {partial.block_hash for partial in partials}
    world.pool.drop(blocks)
    world.assert_idle()
