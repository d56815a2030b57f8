"""Whose block it is, and what it holds: asked at every posting, every copy and every result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.protocol.ids import BlockNumber, InstanceId, TransferId
from kvferry.protocol.messages import Granted
from tests.model.ownership.content import Memory, OwnershipError, Text
from tests.model.ownership.driven import BLOCK_TOKENS, PostRead, PostWrite, ReceiveResult


@dataclass(eq=False)
class Targets:
    """Blocks that a receiver has set aside for one transfer, by position from the first on."""

    memory: Memory
    text: Text
    blocks: tuple[BlockNumber, ...]
    first_block: int
    times_given: tuple[int, ...] = field(init=False)
    num_tokens_of: dict[BlockNumber, int] = field(default_factory=dict)
    """Of a history: how far a partial block is filled."""
    are_received: bool = False
    """The engine was told that all is there: it may go on."""
    posted: set[tuple[object, ...]] = field(default_factory=set)
    """What was written into them, by position and source."""

    def __post_init__(self) -> None:
        self.times_given = tuple(self.memory.times_given[b] for b in self.blocks)

    def index(self, block: BlockNumber) -> int:
        """Return which of them ``block`` is. Raises ``OwnershipError`` if it is none."""
        if block not in self.blocks:
            raise OwnershipError(f"block {block} of {self.memory.name} is not set aside for this")
        return self.blocks.index(block)

    def are_still_its_own(self, block: BlockNumber) -> bool:
        """Whether ``block`` is neither free nor anybody else's, the engine's that goes on with it
        included."""
        was_given = self.memory.times_given[block] != self.times_given[self.index(block)]
        return not was_given and not self.are_received and self.memory.is_held(block)

    def wanted(self, block: BlockNumber) -> Text:
        """Return the text whose last block is to be in ``block``."""
        position = self.first_block + self.index(block)
        num_tokens = self.num_tokens_of.get(block, BLOCK_TOKENS)
        return self.text.cut(position * BLOCK_TOKENS + num_tokens)

    def require(self, memory: Memory, source: BlockNumber, target: BlockNumber, why: str) -> None:
        """Raise unless ``source`` in ``memory`` holds what ``target`` is for."""
        text = self.wanted(target)
        memory.require(source, text.at(text.num_blocks - 1), why)


@dataclass(eq=False)
class Promise:
    """A lease that a holder has granted: its blocks stay as they are until then."""

    granted: Granted
    ends_at_s: float


@dataclass(eq=False)
class Copy:
    """A posted transfer: its blocks may be copied one by one, at any moment until its end."""

    transfer_id: TransferId
    source: Memory
    targets: Targets
    left: list[tuple[BlockNumber, BlockNumber]]
    """Source and target blocks that are not copied yet."""
    protected_until_s: Callable[[], float]
    """Until when the sources are sure to stay as they are."""


@dataclass
class Oracle:
    """Checks of all instances' transfers."""

    memories: dict[InstanceId, Memory]
    targets: dict[tuple[InstanceId, TransferId], list[Targets]] = field(default_factory=dict)
    """What each receiver has set aside, oldest first."""
    promises: dict[tuple[InstanceId, InstanceId, TransferId], Promise] = field(default_factory=dict)
    """By holder, reader and transfer."""
    copies: list[Copy] = field(default_factory=list)
    source_changes: dict[TransferId, int] = field(default_factory=dict)
    """How often a prefill has told of other blocks than before, or of none."""
    written_last: dict[TransferId, Targets] = field(default_factory=dict)

    def set_aside(
        self,
        receiver: InstanceId,
        transfer_id: TransferId,
        text: Text,
        blocks: Sequence[BlockNumber],
        first_block: int,
    ) -> None:
        """A receiver gives ``blocks`` to be filled."""
        targets = Targets(self.memories[receiver], text, tuple(blocks), first_block)
        self.targets.setdefault((receiver, transfer_id), []).append(targets)

    # -- READs ----------------------------------------------------------------------------------
    def grant(
        self, holder: InstanceId, reader: InstanceId, transfer_id: TransferId, promise: Promise
    ) -> None:
        """A holder has promised something; an earlier promise by the same name is over."""
        self.break_promise(holder, reader, transfer_id)
        self.promises[holder, reader, transfer_id] = promise

    def break_promise(
        self, holder: InstanceId, reader: InstanceId, transfer_id: TransferId
    ) -> None:
        """The reader has released it."""
        promise = self.promises.pop((holder, reader, transfer_id), None)
        if promise is not None:
            promise.ends_at_s = -math.inf

    def post_read(
        self, reader: InstanceId, holder: InstanceId, effect: PostRead, now_s: float
    ) -> Copy:
        """A READ is posted: its targets are the receive's own, its sources right while leased."""
        targets = self.targets[reader, effect.transfer_id][-1]
        if effect.local_blocks != targets.blocks[: len(effect.local_blocks)]:
            raise OwnershipError(f"{effect} does not fill the blocks given, from the first on")
        promise = self.promises.get((holder, reader, effect.transfer_id))
        for partial in promise.granted.partials if promise is not None else ():
            if partial.block == effect.remote_blocks[-1]:
                targets.num_tokens_of[effect.local_blocks[-1]] = partial.num_tokens
        return self._post(
            Copy(
                effect.transfer_id,
                self.memories[holder],
                targets,
                list(zip(effect.remote_blocks, effect.local_blocks, strict=True)),
                lambda: -math.inf if promise is None else promise.ends_at_s,
            ),
            now_s,
        )

    # -- WRITEs ---------------------------------------------------------------------------------
    def post_write(
        self,
        sender: InstanceId,
        receiver: InstanceId,
        effect: PostWrite,
        now_s: float,
        *,
        can_land: bool,
    ) -> Copy:
        """A WRITE is posted into what was registered, each position once, from what is right."""
        candidates = self.targets.get((receiver, effect.transfer_id), [])
        targets = next(
            (t for t in reversed(candidates) if set(effect.remote_blocks) <= set(t.blocks)), None
        )
        if targets is None:
            raise OwnershipError(f"{effect} goes to blocks that {receiver} has never registered")
        pairs = list(zip(effect.local_blocks, effect.remote_blocks, strict=True))
        copy = Copy(effect.transfer_id, self.memories[sender], targets, pairs, lambda: math.inf)
        change = self.source_changes.get(effect.transfer_id, 0)
        if self.written_last.get(effect.transfer_id) is not targets:
            targets.posted.clear()  # another registration was obeyed meanwhile
        self.written_last[effect.transfer_id] = targets
        for source, target in pairs:
            key = (target, source, copy.source.times_given[source], change)
            if key in targets.posted:
                raise OwnershipError(f"{effect} is written once more, from the same blocks")
            targets.posted.add(key)
            targets.require(copy.source, source, target, f"{copy.transfer_id} is posted")
        if not can_land:
            copy.left.clear()
        return self._post(copy, now_s)

    # -- both -----------------------------------------------------------------------------------
    def _post(self, copy: Copy, now_s: float) -> Copy:
        self.copies.append(copy)
        self.check(copy, now_s)
        return copy

    def check(self, copy: Copy, now_s: float) -> None:
        """What ``copy`` may still copy is right, and lands where nobody else is."""
        is_protected = now_s < copy.protected_until_s()
        for source, target in copy.left:
            self._check_target(copy, target)
            if is_protected:
                why = f"{copy.transfer_id} may be copied at any moment"
                copy.targets.require(copy.source, source, target, why)

    def _check_target(self, copy: Copy, target: BlockNumber) -> None:
        if not copy.targets.are_still_its_own(target):
            owner = copy.targets.memory
            raise OwnershipError(
                f"block {target} of {owner.name} is free or another's by now "
                f"({owner.contents[target]}), and {copy.transfer_id} may still land there"
            )

    def land(self, copy: Copy, index: int) -> None:
        """One block of ``copy`` is copied now."""
        source, target = copy.left.pop(index)
        self._check_target(copy, target)
        copy.targets.memory.contents[target] = copy.source.contents[source]

    def end(self, copy: Copy) -> None:
        """Nothing more of ``copy`` can land."""
        self.copies.remove(copy)

    def check_received(self, receiver: InstanceId, result: ReceiveResult, num_blocks: int) -> None:
        """A receive is said to have filled its first ``num_blocks``, for good."""
        targets = self.targets[receiver, result.transfer_id][-1]
        filled = targets.blocks[:num_blocks]
        if result.num_partial_tokens:
            targets.num_tokens_of[filled[-1]] = result.num_partial_tokens
        for block in filled:
            targets.require(targets.memory, block, block, f"{result.transfer_id} was received")
        for copy in self._copies_into(targets):
            raise OwnershipError(f"{copy.transfer_id} was received, but {copy.left} still runs")
        targets.are_received = True

    def _copies_into(self, targets: Targets) -> Iterator[Copy]:
        mine = set(targets.blocks)
        for copy in self.copies:
            if copy.targets.memory is targets.memory and mine & {t for _, t in copy.left}:
                yield copy
