"""Ends a handoff that nobody will receive, at its holder's control ports.

kvferry's own engine ends one over HTTP; vLLM has no such endpoint, so there it is told as a
receiver would tell it.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from kvferry.doctor.control_question import control_socket
from kvferry.protocol.codec import encode
from kvferry.protocol.ids import InstanceId, TransferId, new_epoch
from kvferry.protocol.messages import Release, ReleaseOutcome
from kvferry.protocol.params import PeerAddress

_DOCTOR = InstanceId("kvferry-doctor")
_SEQUENCE = 1


@dataclass(frozen=True, slots=True)
class HeldOffer:
    """A finished prefill, and who holds it: one worker a tensor-parallel rank."""

    holder: PeerAddress
    num_ranks: int
    transfer_id: TransferId


def release_offer(offer: HeldOffer, cluster_key: bytes | None, timeout_s: float) -> bool:
    """Tell every rank of the holder; return whether all have answered within ``timeout_s`` each.

    A holder of another epoch has nothing to release, and says so alike.
    """
    message = Release(
        instance_id=_DOCTOR,
        epoch=new_epoch(),
        transfer_id=offer.transfer_id,
        holder_epoch=offer.holder.epoch,
        outcome=ReleaseOutcome.CANCELLED,
    )
    sent = encode(_SEQUENCE, message)
    addresses = [offer.holder.of_rank(rank).control_address for rank in range(offer.num_ranks)]
    told = [_tell(address, cluster_key, sent, timeout_s) for address in addresses]
    return all(told)


def _tell(address: str, cluster_key: bytes | None, sent: bytes, timeout_s: float) -> bool:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = control_socket(context, cluster_key)
    try:
        socket.connect(address)
        socket.send(sent)
        return bool(socket.poll(int(1e3 * timeout_s)))
    except zmq.ZMQError:
        return False
    finally:
        socket.close(0)
        context.term()
