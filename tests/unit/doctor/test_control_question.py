"""Why a control port does not answer, told apart on real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvferry.connector.config import ExchangeConfig
from kvferry.connector.control import ControlContext, ControlServer
from kvferry.doctor.control_question import ask_control_port
from kvferry.doctor.facts import ControlEnd, ControlFacts
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.messages import Message, Released
from kvferry.protocol.version import PROTOCOL_VERSION
from tests.unit.doctor.deployment_facts import info_of

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
TIMEOUT_S = 20.0
"""Far more than any answer takes."""
SILENCE_S = 4.0
"""For what only ends in silence, after a connection that a busy machine may take a while for."""
SHORT_S = 0.5
"""For what not even a connection comes of."""
INFO = info_of("decode")
FROM_AFAR = msgspec.msgpack.encode({"version": 99, "sequence": 1, "message": {"type": "x"}})
Answer = Callable[[ControlServer], None]


def _with_info(server: ControlServer) -> None:
    for received in server.receive():
        server.reply(received, INFO)


def _with_message(message: Message) -> Answer:
    def answer(server: ControlServer) -> None:
        for received in server.receive():
            server.reply(received, message)

    return answer


def _with_bytes(data: bytes) -> Answer:
    def answer(server: ControlServer) -> None:
        for received in server.receive():
            server.socket.send_multipart([received.identity, data])

    return answer


def _with_nothing(server: ControlServer) -> None:
    server.receive()


class _Served:
    """A control port that answers on a thread of its own."""

    def __init__(self, key: bytes | None, answer: Answer) -> None:
        self._key, self._answer = key, answer
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        self.address = ""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._is_ready.wait(TIMEOUT_S)

    def _serve(self) -> None:
        context = ControlContext(self._key)
        config = ExchangeConfig(
            instance_id=InstanceId("decode"), epoch=Epoch(1), cluster_key=self._key
        )
        server = ControlServer(context, config, lambda _: None)
        self.address = server.address
        self._is_ready.set()
        while not self._is_over.is_set():
            if server.socket.poll(20):
                self._answer(server)
        server.close()
        context.close()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


Serve = Callable[[bytes | None, Answer], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    served: list[_Served] = []

    def start(key: bytes | None, answer: Answer) -> str:
        served.append(_Served(key, answer))
        return served[-1].address

    yield start
    for item in served:
        item.close()


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "with a key"])
def test_an_instance_says_who_it_is(serve: Serve, key: bytes | None) -> None:
    address = serve(key, _with_info)
    found = ask_control_port(address, key, TIMEOUT_S)
    assert (found.address, found.end, found.info) == (address, ControlEnd.ANSWERED, INFO)
    assert found.protocol_version == PROTOCOL_VERSION
    assert found.round_trip_s is not None
    assert 0 <= found.round_trip_s < TIMEOUT_S


@pytest.mark.parametrize(
    ("theirs", "ours", "end"),
    [
        (KEY, OTHER_KEY, ControlEnd.KEY_REFUSED),
        (None, KEY, ControlEnd.KEY_REFUSED),
        (KEY, None, ControlEnd.KEY_WANTED),
    ],
    ids=["another key", "a key for none", "no key"],
)
def test_a_wrong_key_is_told_from_silence_and_before_the_time_is_over(
    serve: Serve, theirs: bytes | None, ours: bytes | None, end: ControlEnd
) -> None:
    address = serve(theirs, _with_info)
    assert ask_control_port(address, ours, TIMEOUT_S) == ControlFacts(address=address, end=end)


def test_a_port_that_nobody_listens_on_is_told_from_silence() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unheard.getsockname()[1]}"
        assert ask_control_port(address, None, SHORT_S).end is ControlEnd.NOBODY


def test_an_instance_that_does_not_answer_is_silent(serve: Serve) -> None:
    address = serve(None, _with_nothing)
    assert ask_control_port(address, None, SILENCE_S).end is ControlEnd.SILENT


def test_a_process_that_stands_still_is_silent() -> None:
    with socket.socket() as stopped:
        stopped.bind(("127.0.0.1", 0))
        stopped.listen()
        address = f"tcp://127.0.0.1:{stopped.getsockname()[1]}"
        assert ask_control_port(address, None, SILENCE_S).end is ControlEnd.SILENT


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (_with_message(Released()), "Released"),
        (_with_bytes(b"\x00"), "malformed"),
        (_with_bytes(FROM_AFAR), "version 99"),
    ],
    ids=["another message", "noise", "a version from afar"],
)
def test_what_is_not_understood_is_said(serve: Serve, answer: Answer, detail: str) -> None:
    found = ask_control_port(serve(None, answer), None, TIMEOUT_S)
    assert found.end is ControlEnd.NOT_UNDERSTOOD
    assert detail in found.detail


def test_what_is_no_address_is_said() -> None:
    found = ask_control_port("tcp://nowhere", None, SHORT_S)
    assert found.end is ControlEnd.BAD_ADDRESS
    assert found.detail
