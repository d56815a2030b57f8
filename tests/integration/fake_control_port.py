"""A control port that answers who is there, on a thread of its own, with the exchange's socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from kvferry.connector.config import ExchangeConfig
from kvferry.connector.peers.control import ControlContext, ControlServer
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.messages import InstanceInfo, Message
from tests.integration.exchange_pair import LAYOUT

_POLL_MS = 20


class FakeControlPort:
    """Says that it is ``name``, started for the ``epoch``-th time."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.epoch = 1
        self.capabilities: tuple[str, ...] = ("pull", "push", "history")
        self.answer: Message | None = None
        """Instead of who is there."""
        self.is_silent = False
        self.num_asked = 0

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            instance_id=InstanceId(self.name),
            epoch=Epoch(self.epoch),
            control_address=self.address,
            fingerprint=LAYOUT.fingerprint(),
            layout=LAYOUT,
            transport="nixl",
            capabilities=self.capabilities,
            num_blocks=100,
            num_free_blocks=60,
        )


@contextmanager
def fake_control_port(name: str, cluster_key: bytes | None = None) -> Iterator[FakeControlPort]:
    context = ControlContext(cluster_key)
    config = ExchangeConfig(instance_id=InstanceId(name), epoch=Epoch(1), cluster_key=cluster_key)
    server = ControlServer(context, config)
    port = FakeControlPort(name, server.address)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            if not server.socket.poll(_POLL_MS, zmq.POLLIN):
                continue
            for received in server.receive():
                port.num_asked += 1
                if not port.is_silent:
                    server.reply(received, port.answer or port.info())
        server.close()

    thread = threading.Thread(target=serve, name=f"control port of {name}")
    thread.start()
    try:
        yield port
    finally:
        is_over.set()
        thread.join()
        context.close()
