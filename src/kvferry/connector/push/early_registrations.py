"""What receivers say of a push before its prefill is known: bounded in number, size and time.

Also owns what makes any registration fit a prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.connector.effects import Notify
from kvferry.connector.ports import PromptIdentity
from kvferry.connector.transfers import RoleContext
from kvferry.protocol import messages
from kvferry.protocol.ids import TransferId

MAX_EARLY_BLOCKS = 262_144
MAX_UNWANTED = 4096
MAX_REFUSED = 4096
NOT_PUSHED = "its prefill is handed over by pull"


@dataclass(frozen=True, slots=True)
class EarlyRegistration:
    """One registration and when it is forgotten (monotonic seconds)."""

    reader: str
    message: messages.Register
    ends_s: float


class EarlyRegistrations:
    """Kept in order of arrival; each lasts as long as its receiver waits."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._kept: OrderedDict[TransferId, EarlyRegistration] = OrderedDict()
        self._num_blocks = 0
        self._unwanted: OrderedDict[TransferId, None] = OrderedDict()
        """Released before their prefill was known."""
        self._refused: OrderedDict[TransferId, messages.Failed] = OrderedDict()
        """Withdrawn before their prefill was known. Kept apart from the ends of pushes that began:
        messages about unknown ids must not push those out."""

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    def __contains__(self, transfer_id: TransferId) -> bool:
        """Return whether one is kept for ``transfer_id``."""
        return transfer_id in self._kept

    def put(
        self, reader: str, message: messages.Register
    ) -> messages.Registered | messages.Declined:
        """Keep a registration, or decline it where there is no room; the latest generation wins."""
        refused = self._refused.get(message.transfer_id)
        if refused is not None:
            self._context.emit(Notify(message.transfer_id, refused))
            return messages.decline(messages.DeclineReason.GONE, refused.detail)
        self._unwanted.pop(message.transfer_id, None)
        kept = self._kept.get(message.transfer_id)
        is_repeated = kept is not None and kept.reader == reader
        if kept is not None and is_repeated and kept.message.generation >= message.generation:
            return messages.Registered(kept.message.generation)
        self.pop(message.transfer_id)
        full = len(self._kept) >= self._context.config.max_early_registrations
        if full or self._num_blocks + len(message.blocks) > MAX_EARLY_BLOCKS:
            detail = f"{len(self._kept)} registrations wait for their prefill already"
            return messages.decline(messages.DeclineReason.PRESSURE, detail)
        lasts_s = min(message.timeout_s, self._context.config.prefill_timeout_s)
        ends_s = self._context.now_s() + lasts_s
        self._kept[message.transfer_id] = EarlyRegistration(reader, message, ends_s)
        self._num_blocks += len(message.blocks)
        return messages.Registered(message.generation)

    def pop(self, transfer_id: TransferId) -> EarlyRegistration | None:
        """Take one out, if there is one."""
        early = self._kept.pop(transfer_id, None)
        if early is not None:
            self._num_blocks -= len(early.message.blocks)
        return early

    def decline(self, transfer_id: TransferId, detail: str) -> None:
        """Take one out, if there is one, and tell its receiver why."""
        if self.pop(transfer_id) is not None:
            self.tell_mismatch(transfer_id, detail)

    def tell_mismatch(self, transfer_id: TransferId, detail: str) -> None:
        """Tell a receiver that its registration is not for this prefill."""
        failed = messages.Failed(transfer_id, messages.FailureReason.MISMATCH, True, detail)
        self._context.emit(Notify(transfer_id, failed))

    def fail(self, transfer_id: TransferId) -> None:
        """The prefill will never begin: tell whoever has registered, or will."""
        if transfer_id in self._refused:
            return
        self.pop(transfer_id)
        failed = messages.Failed(
            transfer_id, messages.FailureReason.ABORTED, True, "the prefill never began"
        )
        self._refused[transfer_id] = failed
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        self._context.emit(Notify(transfer_id, failed))

    def refusal(self, transfer_id: TransferId) -> messages.Failed | None:
        """Return what is told of a prefill that will never begin."""
        return self._refused.get(transfer_id)

    def withdraw(self, transfer_id: TransferId, reader: str) -> bool:
        """``reader`` wants no more of a transfer; return whether nobody else has registered."""
        early = self._kept.get(transfer_id)
        if early is not None and early.reader != reader:
            return False
        self.pop(transfer_id)
        self._unwanted[transfer_id] = None
        if len(self._unwanted) > MAX_UNWANTED:
            self._unwanted.popitem(last=False)
        return True

    def is_wanted(self, transfer_id: TransferId) -> bool:
        """Return whether nobody has withdrawn from a transfer, or another has registered since."""
        return transfer_id not in self._unwanted

    def begin(self, transfer_id: TransferId) -> bool:
        """The prefill is known from now on; return whether it is wanted."""
        is_wanted = self.is_wanted(transfer_id)
        self._unwanted.pop(transfer_id, None)
        return is_wanted

    def drop_reader(self, reader: str) -> None:
        """Forget all that ``reader`` has registered."""
        for transfer_id in [t for t, e in self._kept.items() if e.reader == reader]:
            self.pop(transfer_id)

    def expire(self) -> None:
        """Forget those whose receiver waits no more."""
        now_s = self._context.now_s()
        for transfer_id in [t for t, e in self._kept.items() if e.ends_s <= now_s]:
            self.pop(transfer_id)

    def next_expiry_s(self) -> float | None:
        """Return when the next one is forgotten, or None."""
        return min((e.ends_s for e in self._kept.values()), default=None)


def find_mismatch(
    prompt: PromptIdentity, message: messages.Register, block_size_tokens: int
) -> messages.Declined | None:
    """Return the refusal of a registration that is not for all of the rest of ``prompt``."""
    if (message.num_tokens, message.digest) != (prompt.num_tokens, prompt.digest):
        detail = (
            f"the prompt has {prompt.num_tokens} tokens here and {message.num_tokens} there, "
            "or its tokens, salt or adapter differ"
        )
        return messages.decline(messages.DeclineReason.MISMATCH, detail)
    num_blocks = -(-prompt.num_tokens // block_size_tokens)
    if message.first_block + len(message.blocks) != num_blocks:
        detail = (
            f"{len(message.blocks)} blocks from position {message.first_block} on do not end "
            f"a prompt of {num_blocks} blocks"
        )
        return messages.decline(messages.DeclineReason.MISMATCH, detail)
    return None
