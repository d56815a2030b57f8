"""What an effect that asks a peer for something says on the wire."""

from __future__ import annotations

from kvferry.connector.machine.effects import (
    SendAcquire,
    SendAcquireHistory,
    SendRegister,
    SendRelease,
    SendRenew,
)
from kvferry.protocol.messages import (
    Acquire,
    AcquireHistory,
    Hello,
    Register,
    Release,
    Renew,
    Request,
)

Sendable = SendAcquire | SendAcquireHistory | SendRegister | SendRenew | SendRelease


def to_request(effect: Sendable, own: Hello, *, want_block_digests: bool) -> Request:
    """Return the request for ``effect``; ``own`` says who asks."""
    match effect:
        case SendAcquire() | SendAcquireHistory():
            return _acquire(effect, own, want_block_digests=want_block_digests)
        case SendRegister():
            return Register(
                instance_id=own.instance_id,
                epoch=own.epoch,
                holder_epoch=effect.peer.epoch,
                transfer_id=effect.transfer_id,
                generation=effect.generation,
                num_tokens=effect.num_tokens,
                digest=effect.digest,
                first_block=effect.first_block,
                blocks=effect.blocks,
                timeout_s=effect.timeout_s,
                want_block_digests=want_block_digests,
            )
        case SendRenew():
            return Renew(effect.transfer_id, effect.peer.epoch, effect.duration_s)
        case SendRelease():
            return Release(
                own.instance_id, own.epoch, effect.transfer_id, effect.peer.epoch, effect.outcome
            )


def _acquire(
    effect: SendAcquire | SendAcquireHistory, own: Hello, *, want_block_digests: bool
) -> Acquire | AcquireHistory:
    if isinstance(effect, SendAcquire):
        return Acquire(
            instance_id=own.instance_id,
            epoch=own.epoch,
            holder_epoch=effect.peer.epoch,
            transfer_id=effect.transfer_id,
            num_tokens=effect.num_tokens,
            digest=effect.digest,
            duration_s=effect.duration_s,
            first_block=effect.first_block,
            want_block_digests=want_block_digests,
        )
    return AcquireHistory(
        instance_id=own.instance_id,
        epoch=own.epoch,
        holder_epoch=effect.peer.epoch,
        transfer_id=effect.transfer_id,
        block_hashes=effect.block_hashes,
        min_blocks=effect.min_blocks,
        duration_s=effect.duration_s,
        want_block_digests=want_block_digests,
        want_partials=True,
    )
