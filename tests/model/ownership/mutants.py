"""Ways in which the connector, or an engine, would give somebody another's tokens.

Each changes the real code for one test. All that is known here of the connector's insides is in
this file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvferry.blocks.quarantine import Quarantine
from kvferry.blocks.retention import RenewingBlocks
from kvferry.connector.ports import HistoryRequest
from kvferry.connector.pull import receiver
from kvferry.connector.pull import table as pull
from kvferry.connector.push.receiver import IncomingPush, PushReceiver
from kvferry.connector.push.sender import OutgoingPush, PushSender
from kvferry.connector.push.table import IncomingState
from kvferry.connector.table import Rule
from kvferry.protocol import hashing
from kvferry.protocol.ids import BlockHash, BlockNumber
from kvferry.protocol.messages import PartialBlock, Register
from tests.model.ownership import driven as ferry
from tests.model.ownership.driven import Driven
from tests.model.ownership.engine import Engine

Mutant = Callable[[pytest.MonkeyPatch], None]


def a_send_has_no_reference(patch: pytest.MonkeyPatch) -> None:
    """What an engine has told of stays only as long as the engine keeps it; WRITEs are pinned."""
    call, hold, drop = Driven.call, RenewingBlocks.hold, RenewingBlocks.drop
    missing: Counter[tuple[int, BlockNumber]] = Counter()
    telling: list[str] = []

    def holds_nothing(self: RenewingBlocks, blocks: Sequence[BlockNumber]) -> None:
        if telling:
            missing.update((id(self), block) for block in blocks)
        else:
            hold(self, blocks)

    def drops_less(self: RenewingBlocks, blocks: Sequence[BlockNumber]) -> None:
        for block in blocks:
            if missing[id(self), block] > 0:
                missing[id(self), block] -= 1
            else:
                drop(self, [block])

    def tells(self: Driven, name: str, *args: object, **options: object) -> tuple[Any, Any]:
        if name != "advance_send":
            return call(self, name, *args, **options)
        telling.append(name)
        try:
            answer, effects = call(self, name, *args, **options)
        finally:
            telling.clear()
        for effect in effects:
            if isinstance(effect, ferry.PostWrite):
                hold(self.blocks, effect.local_blocks)
                missing.subtract((id(self.blocks), block) for block in effect.local_blocks)
        return answer, effects

    patch.setattr(RenewingBlocks, "hold", holds_nothing)
    patch.setattr(RenewingBlocks, "drop", drops_less)
    patch.setattr(Driven, "call", tells)


def generations_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """A sender obeys whatever registration comes last, an old one too."""
    _forget_generation(patch, lambda current, message: message.generation < current)


def a_repeated_generation_is_new(patch: pytest.MonkeyPatch) -> None:
    """A registration that comes twice is begun twice."""
    _forget_generation(patch, lambda current, message: message.generation == current)


def _forget_generation(
    patch: pytest.MonkeyPatch, is_forgotten: Callable[[int, Register], bool]
) -> None:
    register = PushSender.register

    def forgets(self: PushSender, reader: str, message: Register) -> Any:  # noqa: ANN401
        send = self._outgoing.find(message.transfer_id, OutgoingPush)
        current = send.registration if send is not None else None
        is_its_own = current is not None and current.reader == reader
        if send is not None and current is not None and is_its_own:
            is_old_news = is_forgotten(current.generation, message)
            send.registration = None if is_old_news else current
        return register(self, reader, message)

    patch.setattr(PushSender, "register", forgets)


def a_push_leaves_quarantine_in_time(patch: pytest.MonkeyPatch) -> None:
    """After its grace, without any proof."""
    on_deadline = PushReceiver._on_deadline

    def leaves(self: PushReceiver, incoming: IncomingPush) -> None:
        if incoming.state is IncomingState.ENDED:
            self._on_quiet(incoming, incoming.generation)
        else:
            on_deadline(self, incoming)

    patch.setattr(PushReceiver, "_on_deadline", leaves)


def a_read_leaves_quarantine_in_time(patch: pytest.MonkeyPatch) -> None:
    """After its grace, without any proof."""
    leaves = Rule(
        pull.ReceiveState.CLOSED,
        (pull.ReceiveAction.LEAVE_QUARANTINE, pull.ReceiveAction.SEND_RELEASE),
    )
    key = (pull.ReceiveState.QUARANTINED, pull.ReceiveEvent.GRACE_OVER)
    patch.setitem(pull.RECEIVER.rules, key, leaves)


def nothing_enters_quarantine(patch: pytest.MonkeyPatch) -> None:
    """What a posted transfer may still touch is free at once."""

    def enters_not(self: Quarantine, key: object, peer: str, blocks: object) -> None:
        pass

    patch.setattr(Quarantine, "enter", enters_not)


def blocks_are_published_early(patch: pytest.MonkeyPatch) -> None:
    """Before the step has completed that fills them."""
    patch.setattr(Engine, "PUBLISHES_EARLY", True)


def progress_is_told_early(patch: pytest.MonkeyPatch) -> None:
    """Before the step has completed that fills the blocks."""
    patch.setattr(Engine, "TELLS_EARLY", True)


def salts_are_left_out(patch: pytest.MonkeyPatch) -> None:
    """Of the hashes: tenants find each other's blocks."""
    root = hashing.chain_root

    def unsalted(fingerprint: bytes, *, salt: str = "", lora: str = "") -> BlockHash:
        return root(fingerprint, salt="", lora=lora)

    patch.setattr(hashing, "chain_root", unsalted)


def leases_do_not_end_for_readers(patch: pytest.MonkeyPatch) -> None:
    """A READ that ends after its lease counts as received."""

    def never(sent_at_s: float, duration_s: float, **options: float) -> float:
        return math.inf

    patch.setattr(receiver, "reader_deadline_s", never)


def partial_blocks_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A partial block is read whatever its hash says."""

    def believes(
        self: HistoryRequest, num_found: int, partials: Sequence[PartialBlock]
    ) -> PartialBlock | None:
        start = num_found * self.block_size_tokens
        most = min(len(self.tokens) - start, self.block_size_tokens - 1)
        has_room = 1 <= num_found < len(self.blocks)
        return next((p for p in partials if has_room and p.num_tokens <= most), None)

    patch.setattr(HistoryRequest, "fitting", believes)


MUTANTS: list[Mutant] = [
    a_send_has_no_reference,
    generations_are_ignored,
    a_repeated_generation_is_new,
    a_push_leaves_quarantine_in_time,
    a_read_leaves_quarantine_in_time,
    nothing_enters_quarantine,
    blocks_are_published_early,
    progress_is_told_early,
    salts_are_left_out,
    leases_do_not_end_for_readers,
    partial_blocks_are_believed,
]
