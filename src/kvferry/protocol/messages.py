"""Control messages between two instances: tagged, versioned, bounded.

Requests go from a client socket to a peer's control socket and get exactly one reply with the same
``sequence``; a sender's notices come back the same way, with sequence 0. Durations cross the wire,
never absolute times.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.compatibility import Compatibility, KVLayout
from kvferry.protocol.ids import (
    MAX_TRANSFER_ID_CHARS,
    TRANSFER_ID_PATTERN,
    BlockHash,
    BlockNumber,
    Epoch,
    InstanceId,
    LeaseId,
    TransferId,
)
from kvferry.protocol.prefill_result import FirstToken, PrefillReport

MAX_BLOCKS_PER_MESSAGE = 65_536
MAX_PARTIALS = 8
MAX_METADATA_BYTES = 262_144
MAX_BLOCK_NUMBER = 2**31 - 1
MAX_NAME_CHARS = 256
MAX_DETAIL_CHARS = 1024
MAX_FIELD_CHARS = 128
MAX_DURATION_S = 86_400
MAX_RECEIVE_OUTCOMES = 64

_TransferId = Annotated[
    TransferId,
    Meta(min_length=1, max_length=MAX_TRANSFER_ID_CHARS, pattern=TRANSFER_ID_PATTERN),
]
_InstanceId = Annotated[InstanceId, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
_Block = Annotated[BlockNumber, Meta(ge=0, le=MAX_BLOCK_NUMBER)]
_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
_BlockHash = Annotated[BlockHash, Meta(min_length=32, max_length=32)]
_Metadata = Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
_Duration = Annotated[float, Meta(ge=0, le=MAX_DURATION_S)]
_Count = Annotated[int, Meta(ge=0, le=2**40)]
_Epoch = Annotated[Epoch, Meta(ge=0, le=2**62)]
_LeaseId = Annotated[LeaseId, Meta(ge=0, le=2**62)]


class DeclineReason(enum.StrEnum):
    """Why a holder does not grant what was asked. A text that is unknown here, of a newer holder,
    is a refusal all the same; its ``detail`` says why."""

    GONE = "gone"
    """The blocks, the transfer id or the epoch do not exist (any more)."""
    EXPIRED = "expired"
    MISMATCH = "mismatch"
    """The prompt's token count or digest differs."""
    PRESSURE = "pressure"
    """Given up because the holder's pool or a cap needed the room."""
    INCOMPATIBLE = "incompatible"
    UNKNOWN_PEER = "unknown_peer"
    """No handshake with this sender yet in this epoch."""
    MALFORMED = "malformed"

    @classmethod
    def _missing_(cls, value: object) -> DeclineReason | None:
        return cls.PRESSURE if isinstance(value, str) else None


class FailureReason(enum.StrEnum):
    """Why a sender gives a push up. A text that is unknown here, of a newer sender, is a failure
    all the same; its ``detail`` says why."""

    ABORTED = "aborted"
    """The prefill request ended before its prompt was computed."""
    MISMATCH = "mismatch"
    """The prompt's token count or digest differs."""
    EXPIRED = "expired"
    PRESSURE = "pressure"
    TRANSPORT = "transport"
    """A WRITE failed, or ran for too long."""

    @classmethod
    def _missing_(cls, value: object) -> FailureReason | None:
        return cls.TRANSPORT if isinstance(value, str) else None


class ReleaseOutcome(enum.StrEnum):
    """How the receiver's side of a handoff ended."""

    READ = "read"
    NOT_NEEDED = "not_needed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @classmethod
    def _missing_(cls, value: object) -> ReleaseOutcome | None:
        """Whatever a newer receiver calls its end, it reads nothing any more."""
        return cls.FAILED if isinstance(value, str) else None


class _Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=False):
    """Unknown fields are allowed, here and in all that is nested, so that N+1 may add one."""


class _Handshake(_Message, frozen=True):
    """What must be alike is compared before ``transport_metadata`` is decoded."""

    instance_id: _InstanceId
    epoch: _Epoch
    layout: KVLayout
    transport: _Name
    transport_metadata: _Metadata
    compatibility: Compatibility | None = None


class Hello(_Handshake, frozen=True, tag="hello"):
    """The reader's half of the handshake."""


class HelloReply(_Handshake, frozen=True, tag="hello_reply"):
    """The holder's half of the handshake."""


class _FromReader(_Message, frozen=True):
    """What a reader that has shaken hands asks about a transfer."""

    instance_id: _InstanceId
    epoch: _Epoch
    holder_epoch: _Epoch
    transfer_id: _TransferId


class Acquire(_FromReader, frozen=True, tag="acquire"):
    """Ask for a lease on a finished handoff's blocks, and announce that they will be read."""

    num_tokens: _Count
    digest: _Digest
    duration_s: _Duration
    first_block: _Count = 0
    """Position of the first block wanted; earlier ones are in the reader's own cache."""
    want_block_digests: bool = False


class AcquireHistory(_FromReader, frozen=True, tag="acquire_history"):
    """Ask for a lease on what the holder has of a conversation: the blocks that the leading
    ``block_hashes`` find there. Answered by ``Granted`` with as many blocks as were found, or by
    ``Declined`` (``gone``) if those are fewer than ``min_blocks``. ``transfer_id`` is the reader's
    own, and names the lease in ``Release``."""

    block_hashes: Annotated[
        tuple[_BlockHash, ...], Meta(min_length=1, max_length=MAX_BLOCKS_PER_MESSAGE)
    ]
    min_blocks: _Count
    duration_s: _Duration
    want_block_digests: bool = False
    want_partials: bool = False
    """Also grant the partial blocks that follow the last full one found."""


class PartialBlock(msgspec.Struct, frozen=True):
    """A block of which the first ``num_tokens`` positions are filled. Its hash is over its parent
    and those tokens: the reader compares it with its own, and reads nothing that differs."""

    block: _Block
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_BLOCK_NUMBER)]
    block_hash: _BlockHash


class Granted(_Message, frozen=True, tag="granted"):
    """A lease: ``blocks`` will not be reused for ``duration_s`` from when this was sent."""

    lease_id: _LeaseId
    duration_s: _Duration
    blocks: Annotated[tuple[_Block, ...], Meta(max_length=MAX_BLOCKS_PER_MESSAGE)]
    """Holder's block numbers for positions ``first_block`` and on."""
    block_digests: Annotated[
        tuple[_Digest, ...], Meta(max_length=MAX_BLOCKS_PER_MESSAGE + MAX_PARTIALS)
    ] = ()
    """Of ``blocks``, then of ``partials``."""
    partials: Annotated[tuple[PartialBlock, ...], Meta(max_length=MAX_PARTIALS)] = ()
    """Of a history only: each may follow the last of ``blocks``, at most one of them does."""


class Renew(_Message, frozen=True, tag="renew"):
    """Heartbeat: keep holding a handoff that is not acquired yet. Of a push it also asks the sender
    to repeat the notices that still matter."""

    transfer_id: _TransferId
    holder_epoch: _Epoch
    duration_s: _Duration


class Renewed(_Message, frozen=True, tag="renewed"):
    """The hold now lasts at least ``duration_s`` from when this was sent."""

    duration_s: _Duration
    is_admitted: bool = False
    """Push: whether prefill has its blocks and computes, or has finished."""


class Release(_Message, frozen=True, tag="release"):
    """The receiver is done with the handoff; nothing of it will be read any more."""

    instance_id: _InstanceId
    epoch: _Epoch
    transfer_id: _TransferId
    holder_epoch: _Epoch
    outcome: ReleaseOutcome


class Released(_Message, frozen=True, tag="released"):
    """Acknowledges a release; sent also when there was nothing to release."""

    is_quiet: bool = True
    """Whether nothing that was posted for the transfer can touch the receiver's memory any more;
    if not, a ``quiet`` notice follows."""


class Register(_FromReader, frozen=True, tag="register"):
    """Tell the sender which of the receiver's blocks to fill: ``blocks[k]`` gets the position
    ``first_block + k``. May come before, during or after prefill. Of one receiver the highest
    ``generation`` is obeyed: an earlier one's blocks are another's by now. Of several receivers
    the last is. No two registrations under one transfer id share a generation."""

    generation: _Count
    num_tokens: _Count
    digest: _Digest
    first_block: _Count
    blocks: Annotated[tuple[_Block, ...], Meta(min_length=1, max_length=MAX_BLOCKS_PER_MESSAGE)]
    timeout_s: _Duration
    """How long the receiver will wait; an unknown transfer's registration is forgotten then."""
    want_block_digests: bool = False


class Registered(_Message, frozen=True, tag="registered"):
    """Acknowledges a registration."""

    generation: _Count


class Admitted(_Message, frozen=True, tag="admitted"):
    """Notice: prefill has its blocks and computes, so registering waits for nobody."""

    transfer_id: _TransferId


class Posting(_Message, frozen=True, tag="posting"):
    """Notice: WRITEs are being posted; progress the link until ``written``, ``failed`` or
    ``quiet``."""

    transfer_id: _TransferId
    generation: _Count


class FirstTokenReady(_Message, frozen=True, tag="first_token_ready"):
    """Notice: prefill is complete; the last WRITEs may still run."""

    transfer_id: _TransferId
    first_token: FirstToken
    digest: _Digest
    """Of the whole prompt: the token follows no other."""
    prefill_end_s: float | None = None
    """The sender's monotonic clock, for measurements on one host; nothing is decided by it."""
    prefill_report: PrefillReport | None = None


class Written(_Message, frozen=True, tag="written"):
    """Notice: every WRITE of the generation is DONE. ``num_blocks`` positions from ``first_block``
    on hold the KV of ``num_tokens`` tokens."""

    transfer_id: _TransferId
    generation: _Count
    first_block: _Count
    num_blocks: _Count
    num_tokens: _Count
    first_token: FirstToken
    digest: _Digest
    prefill_end_s: float | None = None
    prefill_report: PrefillReport | None = None
    block_digests: Annotated[tuple[_Digest, ...], Meta(max_length=MAX_BLOCKS_PER_MESSAGE)] = ()
    """Of the positions, as the sender computed them; where the receiver wants them and the sender
    verifies, too."""


class Failed(_Message, frozen=True, tag="failed"):
    """Notice: the sender gives the transfer up; ``detail`` is for people."""

    transfer_id: _TransferId
    reason: FailureReason
    is_quiet: bool
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""


class Quiet(_Message, frozen=True, tag="quiet"):
    """Notice: nothing of ``generation`` or an earlier one can touch the receiver's memory."""

    transfer_id: _TransferId
    generation: _Count


class Declined(_Message, frozen=True, tag="declined"):
    """A request is refused; ``detail`` is for people."""

    reason: DeclineReason
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""
    field: Annotated[str, Meta(max_length=MAX_FIELD_CHARS)] = ""
    """For ``incompatible``: the differing field, of the layout or beyond."""


class InstanceQuery(_Message, frozen=True, tag="instance"):
    """Ask who is there; needs no handshake."""


class InstanceInfo(_Message, frozen=True, tag="instance_info"):
    """Who is there. The same is shown by ``GET /kvferry/instance``."""

    instance_id: _InstanceId
    epoch: _Epoch
    control_address: _Name
    fingerprint: _Digest
    layout: KVLayout
    transport: _Name
    capabilities: Annotated[tuple[_Name, ...], Meta(max_length=64)]
    num_blocks: _Count
    num_free_blocks: _Count
    software_version: _Name = ""
    """kvferry's release; empty: one that did not tell it yet."""
    compatibility: Compatibility | None = None
    receives: Annotated[dict[_Name, _Count], Meta(max_length=MAX_RECEIVE_OUTCOMES)] = {}
    """How many receives have ended here since the start, by outcome; for people and metrics."""


def decline(reason: DeclineReason, detail: str = "", field: str = "") -> Declined:
    """Return a refusal whose texts are cut to what a peer accepts."""
    return Declined(reason, detail[:MAX_DETAIL_CHARS], field[:MAX_FIELD_CHARS])


NOTICE_SEQUENCE = 0
"""The sequence number of notices, which answer nothing; requests count from 1."""

Asked = Acquire | AcquireHistory | Register | Renew | Release
"""What is asked of a peer after the handshake, about one transfer."""
Answer = Granted | Registered | Renewed | Released | Declined
Request = Hello | Asked | InstanceQuery
Reply = HelloReply | Answer | InstanceInfo
Notice = Admitted | Posting | FirstTokenReady | Written | Failed | Quiet
Message = Request | Reply | Notice


class Envelope(msgspec.Struct, frozen=True):
    """What is on the wire: version and sequence, then one message."""

    version: int
    sequence: Annotated[int, Meta(ge=0, le=2**62)]
    message: Message
