"""A control port on a thread of its own, which answers as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.connector.config import ExchangeConfig
from kvferry.connector.peers.control import ControlContext, ControlServer
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.messages import InstanceInfo, Message, Release, Released

TIMEOUT_S = 20.0
"""Far more than any answer takes."""
Answer = Callable[[ControlServer], None]
Serve = Callable[[bytes | None, Answer], str]
"""Key and answer to the address of a port that is served until the test's end."""


def with_info(info: InstanceInfo, releases: list[Release] | None = None) -> Answer:
    """Answer who is there; what is released is added to ``releases``."""

    def answer(server: ControlServer) -> None:
        for received in server.receive():
            reply: Message = info
            if isinstance(received.envelope.message, Release):
                reply = Released()
                if releases is not None:
                    releases.append(received.envelope.message)
            server.reply(received, reply)

    return answer


class ServedControlPort:
    """Serves from the start until ``close``."""

    def __init__(self, key: bytes | None, answer: Answer) -> None:
        self._key, self._answer = key, answer
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        self.address = ""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._is_ready.wait(TIMEOUT_S)

    def _serve(self) -> None:
        context = ControlContext(self._key)
        config = ExchangeConfig(
            instance_id=InstanceId("decode"), epoch=Epoch(1), cluster_key=self._key
        )
        server = ControlServer(context, config)
        self.address = server.address
        self._is_ready.set()
        while not self._is_over.is_set():
            if server.socket.poll(20):
                self._answer(server)
        server.close()
        context.close()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self._is_over.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
