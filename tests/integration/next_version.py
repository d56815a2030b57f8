"""A release that does not exist yet: what passes between two instances, as its peers would say it.

Stands between a receiver's socket and a sender's control port and adds to all that passes: version
N+1, a field in every map, also within link metadata, and elements at the end of its arrays. So each
of the two takes the other for a newer one.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from kvferry.protocol.ids import PROTOCOL_VERSION
from kvferry.protocol.params import PeerAddress
from tests.integration.exchange_pair import Side

_POLL_MS = 10
_HEAD_BYTES = len(b"kvferry-link-1:") + 16
MORE = {"anything": [1, "two", None]}
Change = Callable[[dict[str, Any]], None]


def extended(value: Any, *, is_region: bool = False) -> Any:  # noqa: ANN401 - any MessagePack value
    """Return ``value`` with a field more in every map, and an element in every region."""
    if isinstance(value, dict):
        more = {key: extended(v, is_region=key == "regions") for key, v in value.items()}
        if "transport_metadata" in more:
            more["transport_metadata"] = _extended_metadata(more["transport_metadata"])
        return more | {"added_next": MORE}
    if not isinstance(value, list):
        return value
    if not is_region:
        return [extended(inner) for inner in value]
    return [_extended_region(region) for region in value]


def with_unknown_memory(message: dict[str, Any]) -> None:
    """Say that the blocks lie in a kind of memory that nobody has heard of."""
    assert b"DRAM" in message["transport_metadata"]
    payload = message["transport_metadata"][_HEAD_BYTES:].replace(b"DRAM", b"MOON")
    message["transport_metadata"] = _sealed(message["transport_metadata"], payload)


def _extended_region(region: list[Any]) -> list[Any]:
    inner = [_extended_region(part) if isinstance(part, list) else part for part in region]
    return [*inner, MORE]


def _extended_metadata(data: bytes) -> bytes:
    payload = msgspec.msgpack.encode(extended(msgspec.msgpack.decode(data[_HEAD_BYTES:])))
    return _sealed(data, payload)


def _sealed(data: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(payload, digest_size=16).digest()
    return data[: _HEAD_BYTES - 16] + digest + payload


@dataclass
class NextVersion:
    """The way to one instance."""

    address: PeerAddress
    changes: dict[str, Change] = field(default_factory=dict)
    """By message type: what else is done to it."""

    def translated(self, data: bytes) -> bytes:
        fields: dict[str, Any] = msgspec.msgpack.decode(data)
        message = fields["message"]
        change = self.changes.get(message["type"])
        fields = extended(fields) | {"version": PROTOCOL_VERSION + 1}
        if change is not None:
            change(fields["message"])
        return msgspec.msgpack.encode(fields)


@contextmanager
def next_version(side: Side) -> Iterator[NextVersion]:
    """The way to ``side`` on which everything is of the next version."""
    target = side.exchange.address
    context = zmq.Context()
    front = context.socket(zmq.ROUTER)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    way = NextVersion(PeerAddress(target.instance_id, target.epoch, f"tcp://127.0.0.1:{port}"))
    is_over = threading.Event()
    thread = threading.Thread(
        target=_relay, args=(context, front, target.control_address, way, is_over)
    )
    thread.start()
    try:
        yield way
    finally:
        is_over.set()
        thread.join()
        context.term()


def _relay(
    context: zmq.Context[zmq.Socket[bytes]],
    front: zmq.Socket[bytes],
    target: str,
    way: NextVersion,
    is_over: threading.Event,
) -> None:
    backs: dict[bytes, zmq.Socket[bytes]] = {}
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    while not is_over.is_set():
        ready = dict(poller.poll(_POLL_MS))
        if front in ready:
            identity, data = front.recv_multipart()
            if identity not in backs:
                backs[identity] = context.socket(zmq.DEALER)
                backs[identity].connect(target)
                poller.register(backs[identity], zmq.POLLIN)
            backs[identity].send(way.translated(data))
        for identity, back in backs.items():
            if back in ready:
                front.send_multipart([identity, way.translated(back.recv())])
    for socket in (front, *backs.values()):
        socket.close(0)
