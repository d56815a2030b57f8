"""What every transport must do, as tests: subclass ``TransportContract`` and say how to make one.

Both sides live in one process and are driven by one thread, as one mover drives its own side.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.errors import (
    ConfigError,
    FerryError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from kvferry.transport.base import (
    Link,
    MemoryRegion,
    Transfer,
    TransferStatus,
    Transport,
    address_of,
)

NUM_BLOCKS = 24
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Shape:
    """A pool: ``num_regions`` regions of ``num_blocks`` runs, ``gap_bytes`` between runs."""

    num_blocks: int = NUM_BLOCKS
    block_bytes: int = 12 * 1024
    num_regions: int = 1
    gap_bytes: int = 0


BLOCK_FIRST = Shape()
PER_LAYER = Shape(block_bytes=4096, num_regions=4, gap_bytes=4096)
SHAPES = pytest.mark.parametrize("shape", [BLOCK_FIRST, PER_LAYER], ids=["dense", "per_layer"])


class Instance:
    """One side: a transport with a registered pool of numbered, distinct bytes."""

    def __init__(self, transport: Transport, shape: Shape, seed: int) -> None:
        self.transport = transport
        self.shape = shape
        stride = shape.block_bytes + shape.gap_bytes
        region_bytes = stride * shape.num_blocks
        view = transport.allocate(region_bytes * shape.num_regions)
        assert bytes(view) == bytes(len(view))
        address = address_of(view)
        self.regions = [
            MemoryRegion(address + i * region_bytes, shape.block_bytes, stride, shape.num_blocks)
            for i in range(shape.num_regions)
        ]
        transport.register(self.regions)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(view, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(view), dtype=np.uint8)
        self._runs = self.bytes.reshape(shape.num_regions, shape.num_blocks, stride)

    def blocks(self, numbers: Sequence[int]) -> npt.NDArray[np.uint8]:
        """A copy of the given blocks, without the gaps: regions, blocks, bytes."""
        return self._runs[:, list(numbers), : self.shape.block_bytes].copy()

    def everything_but(self, numbers: Sequence[int]) -> bytes:
        """All bytes that lie outside the given blocks, gaps included."""
        mask = np.ones_like(self._runs, dtype=bool)
        mask[:, list(numbers), : self.shape.block_bytes] = False
        return bytes(self._runs[mask])


def drive(link: Link, transfer: Transfer, *served_by: Link) -> TransferStatus:
    """Poll until the transfer is terminal, with the peers making progress; bounded."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        status = link.poll(transfer)
        if status is not TransferStatus.IN_PROGRESS:
            return status
        for peer in served_by:
            peer.progress()
    raise AssertionError(f"still in progress after {DEADLINE_S} s")


def connect_pair(a: Instance, b: Instance) -> tuple[Link, Link]:
    """Connect a fresh link of each to the other."""
    link_a, link_b = a.transport.open_link("b"), b.transport.open_link("a")
    link_a.connect(link_b.local_metadata)
    link_b.connect(link_a.local_metadata)
    return link_a, link_b


class TransportContract:
    """Subclasses implement ``make_transport``."""

    def make_transport(self) -> Transport:
        """Return a fresh transport that reaches the others of the same test."""
        raise NotImplementedError

    @pytest.fixture
    def opened(self) -> Iterator[list[Instance]]:
        instances: list[Instance] = []
        yield instances
        for instance in instances:
            instance.transport.close()
            instance.transport.close()

    def make(self, opened: list[Instance], shape: Shape = BLOCK_FIRST) -> Instance:
        instance = Instance(self.make_transport(), shape, seed=len(opened) + 1)
        opened.append(instance)
        return instance

    # -- moving bytes --------------------------------------------------------------------------
    @SHAPES
    @pytest.mark.parametrize(
        ("local", "remote"),
        [
            (range(5), range(5)),
            (range(3, 9), range(10, 16)),
            ([7, 2, 19, 4], [1, 23, 0, 9]),
            ([4, 5, 6, 12, 13, 20], [8, 9, 10, 3, 4, 5]),
            ([9, 8, 7, 6], [3, 2, 1, 0]),
            ([5], [5]),
            (range(NUM_BLOCKS), range(NUM_BLOCKS)),
        ],
        ids=["run", "shifted", "scattered", "partly", "descending", "one", "all"],
    )
    @pytest.mark.parametrize("operation", ["read", "write"])
    def test_moves_exactly_the_blocks_named(
        self,
        opened: list[Instance],
        shape: Shape,
        local: Sequence[int],
        remote: Sequence[int],
        operation: str,
    ) -> None:
        a, b = self.make(opened, shape), self.make(opened, shape)
        link_a, link_b = connect_pair(a, b)
        if operation == "read":
            source, target, there, here = b, a, remote, local
        else:
            source, target, there, here = a, b, local, remote
        expected, untouched = source.blocks(there), target.everything_but(here)
        source_before = source.bytes.tobytes()
        transfer = getattr(link_a, operation)(list(local), list(remote))
        assert transfer.num_bytes == len(local) * shape.block_bytes * shape.num_regions
        assert drive(link_a, transfer, link_b) is TransferStatus.DONE
        assert np.array_equal(target.blocks(here), expected)
        assert target.everything_but(here) == untouched
        assert source.bytes.tobytes() == source_before
        assert link_a.poll(transfer) is TransferStatus.DONE
        link_a.release(transfer)
        link_a.release(transfer)

    def test_pools_of_different_sizes_and_strides_exchange_blocks(
        self, opened: list[Instance]
    ) -> None:
        small = self.make(opened, Shape(num_blocks=4, gap_bytes=0))
        large = self.make(opened, Shape(num_blocks=40, gap_bytes=512))
        link, peer = connect_pair(small, large)
        expected = large.blocks([39, 0, 20])
        transfer = link.read([0, 1, 3], [39, 0, 20])
        assert drive(link, transfer, peer) is TransferStatus.DONE
        assert np.array_equal(small.blocks([0, 1, 3]), expected)

    def test_an_empty_transfer_is_done(self, opened: list[Instance]) -> None:
        link, _ = connect_pair(self.make(opened), self.make(opened))
        transfer = link.read([], [])
        assert transfer.num_bytes == 0
        assert link.poll(transfer) is TransferStatus.DONE
        link.release(transfer)
        link.release(transfer)

    def test_several_transfers_at_once_in_both_directions(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        link_a, link_b = connect_pair(a, b)
        from_b, from_a = b.blocks([0, 1, 2, 3]), a.blocks([20, 21])
        reads = [link_a.read([i], [i]) for i in range(4)]
        write = link_a.write([20, 21], [10, 11])
        back = link_b.read([15, 16], [20, 21])
        for transfer in (*reads, write):
            assert drive(link_a, transfer, link_b) is TransferStatus.DONE
        assert drive(link_b, back, link_a) is TransferStatus.DONE
        assert np.array_equal(a.blocks([0, 1, 2, 3]), from_b)
        assert np.array_equal(b.blocks([10, 11]), from_a)
        assert np.array_equal(b.blocks([15, 16]), from_a)

    def test_two_peers_at_once_do_not_disturb_each_other(self, opened: list[Instance]) -> None:
        center, left, right = (self.make(opened) for _ in range(3))
        to_left, from_left = connect_pair(center, left)
        to_right, from_right = connect_pair(center, right)
        expected_left, expected_right = left.blocks([3]), right.blocks([3])
        first, second = to_left.read([0], [3]), to_right.read([1], [3])
        assert drive(to_right, second, from_right, from_left) is TransferStatus.DONE
        assert drive(to_left, first, from_left) is TransferStatus.DONE
        assert np.array_equal(center.blocks([0]), expected_left)
        assert np.array_equal(center.blocks([1]), expected_right)
        to_left.disconnect()
        third = to_right.read([2], [3])
        assert drive(to_right, third, from_right) is TransferStatus.DONE
        assert np.array_equal(center.blocks([2]), expected_right)

    # -- refusals ------------------------------------------------------------------------------
    @pytest.mark.parametrize(
        ("local", "remote"),
        [
            ([0], [0, 1]),
            ([], [0]),
            ([NUM_BLOCKS], [0]),
            ([0], [NUM_BLOCKS]),
            ([-1], [0]),
            ([0], [-1]),
            ([0], [2**31]),
            ([0], [2**63]),
        ],
    )
    def test_wrong_block_numbers_are_refused_and_nothing_moves(
        self, opened: list[Instance], local: list[int], remote: list[int]
    ) -> None:
        a, b = self.make(opened), self.make(opened)
        link, peer = connect_pair(a, b)
        before = (a.bytes.tobytes(), b.bytes.tobytes())
        for post in (link.read, link.write):
            with pytest.raises(LocalProtocolError):
                post(local, remote)
        assert (a.bytes.tobytes(), b.bytes.tobytes()) == before
        assert drive(link, link.read([0], [0]), peer) is TransferStatus.DONE

    def test_damaged_metadata_is_refused(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        good = b.transport.open_link("a").local_metadata
        assert 0 < len(good) <= 256 * 1024
        flipped = bytes([*good[:-1], good[-1] ^ 1])
        bad = [b"", b"\x80", good[:-1], good + b"\0", flipped, good[: len(good) // 2]]
        bad += [bytes(300 * 1024), b"\x93" * 1000]
        for metadata in bad:
            link = a.transport.open_link("b")
            with pytest.raises(RemoteProtocolError):
                link.connect(metadata)
            with pytest.raises(FerryError):
                link.read([0], [0])
            link.disconnect()
            assert link.is_quiet()

    @pytest.mark.parametrize(
        "other",
        [
            Shape(block_bytes=BLOCK_FIRST.block_bytes * 2),
            Shape(num_regions=2),
            Shape(block_bytes=BLOCK_FIRST.block_bytes // 2, num_regions=2),
        ],
        ids=["block_bytes", "num_regions", "same_total"],
    )
    def test_a_peer_of_another_geometry_is_refused(
        self, opened: list[Instance], other: Shape
    ) -> None:
        a, b = self.make(opened), self.make(opened, other)
        link = a.transport.open_link("b")
        with pytest.raises(RemoteProtocolError, match="bytes"):
            link.connect(b.transport.open_link("a").local_metadata)

    def test_our_own_metadata_is_refused(self, opened: list[Instance]) -> None:
        link = self.make(opened).transport.open_link("b")
        with pytest.raises(RemoteProtocolError):
            link.connect(link.local_metadata)

    def test_regions_that_make_no_sense_are_refused(self) -> None:
        transport = self.make_transport()
        address = address_of(transport.allocate(65_536))
        for wrong in (
            [],
            [MemoryRegion(address, 0, 0, 4)],
            [MemoryRegion(address, 4096, 1024, 4)],
            [MemoryRegion(address, 4096, 4096, 0)],
            [MemoryRegion(address, 4096, 4096, 4), MemoryRegion(address + 16_384, 4096, 4096, 3)],
        ):
            with pytest.raises(ConfigError):
                transport.register(wrong)
        transport.close()

    def test_calls_in_the_wrong_order_are_refused(self, opened: list[Instance]) -> None:
        fresh = self.make_transport()
        with pytest.raises(LocalProtocolError):
            fresh.open_link("nobody")
        fresh.close()
        a, b = self.make(opened), self.make(opened)
        with pytest.raises(LocalProtocolError):
            a.transport.register(a.regions)
        link = a.transport.open_link("b")
        with pytest.raises(LocalProtocolError):
            link.read([0], [0])
        metadata = b.transport.open_link("a").local_metadata
        link.connect(metadata)
        with pytest.raises(LocalProtocolError):
            link.connect(metadata)

    def test_a_transfer_belongs_to_its_link(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        link, peer = connect_pair(a, b)
        transfer = link.read([0], [0])
        with pytest.raises(LocalProtocolError):
            peer.poll(transfer)
        assert drive(link, transfer, peer) is TransferStatus.DONE

    # -- ends ----------------------------------------------------------------------------------
    def test_releasing_is_not_stopping(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        link, peer = connect_pair(a, b)
        transfer = link.write([0, 5, 9], [0, 5, 9])
        with pytest.raises(LocalProtocolError):
            link.release(transfer)
        assert drive(link, transfer, peer) is TransferStatus.DONE
        link.release(transfer)

    def test_disconnect_ends_what_is_in_progress(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        link, peer = connect_pair(a, b)
        transfer = link.read([0, 5, 9], [0, 5, 9])
        assert not link.is_quiet()
        link.disconnect()
        link.disconnect()
        assert link.poll(transfer) is TransferStatus.ERROR
        link.release(transfer)
        link.release(transfer)
        a.bytes[:] = 7
        peer.progress()
        assert bool((a.bytes == 7).all())
        with pytest.raises(FerryError):
            link.read([0], [0])

    def test_quiet_needs_the_peers_word_while_it_lives(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        link, peer = connect_pair(a, b)
        link.disconnect()
        assert not link.is_quiet()
        peer.disconnect()
        assert link.is_quiet()
        assert peer.is_quiet()

    def test_a_peer_that_never_writes_needs_no_word(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        link = a.transport.open_link("b", peer_writes=False)
        link.connect(b.transport.open_link("a").local_metadata)
        assert not link.is_quiet()
        link.disconnect()
        assert link.is_quiet()

    def test_a_peer_that_has_closed_is_unreachable(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        link, _ = connect_pair(a, b)
        b.transport.close()
        with pytest.raises(PeerUnreachableError):
            self._read_until_it_fails(link)
        link.disconnect()
        assert link.is_quiet()

    def test_a_restarted_peer_is_reached_by_a_fresh_link(self, opened: list[Instance]) -> None:
        a, b = self.make(opened), self.make(opened)
        old, _ = connect_pair(a, b)
        b.transport.close()
        restarted = self.make(opened)
        link, peer = connect_pair(a, restarted)
        old.disconnect()
        expected = restarted.blocks([4])
        assert drive(link, link.read([4], [4]), peer) is TransferStatus.DONE
        assert np.array_equal(a.blocks([4]), expected)

    def _read_until_it_fails(self, link: Link) -> None:
        """A first READ may be posted before the end of the peer is noticed."""
        transfer = link.read([0], [0])
        status = drive(link, transfer)
        assert status is TransferStatus.ERROR
        link.read([0], [0])
