"""Why a control port does not answer, told apart on real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from kvferry.client.control_answer import ControlAnswer, ControlEnd
from kvferry.client.control_port import ControlPorts
from kvferry.connector.peers.control import ControlServer
from kvferry.protocol.ids import PROTOCOL_VERSION, InstanceId, TransferId
from kvferry.protocol.messages import Message, Release, Released, ReleaseOutcome
from kvferry.protocol.params import PeerAddress
from tests.unit.client.instance_info import info_of
from tests.unit.client.served_control_port import TIMEOUT_S, Answer, Serve, with_info

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SILENCE_S = 4.0
"""For what only ends in silence, after a connection that a busy machine may take a while for."""
SHORT_S = 0.5
"""For what not even a connection comes of."""
INFO = info_of("decode")
TRANSFER_ID = TransferId("xfer-1")
FROM_AFAR = msgspec.msgpack.encode({"version": 99, "sequence": 1, "message": {"type": "x"}})


async def _find_out(address: str, key: bytes | None, timeout_s: float) -> ControlAnswer:
    with contextlib.closing(ControlPorts(key)) as ports:
        return await ports.find_out(address, timeout_s)


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


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "with a key"])
async def test_an_instance_says_who_it_is(serve: Serve, key: bytes | None) -> None:
    address = serve(key, with_info(INFO))
    found = await _find_out(address, key, TIMEOUT_S)
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
async def test_a_wrong_key_is_told_from_silence_and_before_the_time_is_over(
    serve: Serve, theirs: bytes | None, ours: bytes | None, end: ControlEnd
) -> None:
    address = serve(theirs, with_info(INFO))
    assert await _find_out(address, ours, TIMEOUT_S) == ControlAnswer(address=address, end=end)


async def test_a_port_that_nobody_listens_on_is_told_from_silence() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unheard.getsockname()[1]}"
        assert (await _find_out(address, None, SHORT_S)).end is ControlEnd.NOBODY


async def test_an_instance_that_does_not_answer_is_silent(serve: Serve) -> None:
    address = serve(None, _with_nothing)
    assert (await _find_out(address, None, SILENCE_S)).end is ControlEnd.SILENT


async def test_a_process_that_stands_still_is_silent() -> None:
    with socket.socket() as stopped:
        stopped.bind(("127.0.0.1", 0))
        stopped.listen()
        address = f"tcp://127.0.0.1:{stopped.getsockname()[1]}"
        assert (await _find_out(address, None, SILENCE_S)).end is ControlEnd.SILENT


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (_with_message(Released()), "Released"),
        (_with_bytes(b"\x00"), "malformed"),
        (_with_bytes(FROM_AFAR), "version 99"),
    ],
    ids=["another message", "noise", "a version from afar"],
)
async def test_what_is_not_understood_is_said(serve: Serve, answer: Answer, detail: str) -> None:
    found = await _find_out(serve(None, answer), None, TIMEOUT_S)
    assert found.end is ControlEnd.NOT_UNDERSTOOD
    assert detail in found.detail


async def test_what_is_no_address_is_said() -> None:
    found = await _find_out("tcp://nowhere", None, SHORT_S)
    assert found.end is ControlEnd.BAD_ADDRESS
    assert found.detail


class _OtherProgram:
    """Reads until ``end`` was sent to it, answers as HTTP servers do, and closes."""

    def __init__(self, end: bytes) -> None:
        self._end = end
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        threads = []
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=self._answer, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join(TIMEOUT_S)

    def _answer(self, connection: socket.socket) -> None:
        heard = b""
        with connection:
            while self._end not in heard:
                piece = connection.recv(1024)
                if not piece:
                    return
                heard += piece
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@pytest.fixture(params=[b"\xff", b"\n"], ids=["answers at once", "waits for a line"])
def http_port(request: pytest.FixtureRequest) -> Iterator[str]:
    program = _OtherProgram(request.param)
    yield program.address
    program.close()


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "with a key"])
async def test_another_programs_port_is_told_from_a_wrong_key(
    http_port: str, key: bytes | None
) -> None:
    found = await _find_out(http_port, key, SILENCE_S)
    assert found == ControlAnswer(address=http_port, end=ControlEnd.OTHER_PROGRAM)


async def _cancel(address: str, key: bytes | None, limit_s: float) -> bool:
    holder = PeerAddress(INFO.instance_id, INFO.epoch, address)
    with contextlib.closing(ControlPorts(key)) as ports:
        return await ports.cancel(InstanceId("asker"), TRANSFER_ID, [holder], limit_s)


async def test_a_holder_is_told_with_its_epoch_and_the_cluster_key(serve: Serve) -> None:
    releases: list[Release] = []
    address = serve(KEY, with_info(INFO, releases))
    assert await _cancel(address, KEY, TIMEOUT_S)
    (release,) = releases
    assert (release.transfer_id, release.holder_epoch) == (TRANSFER_ID, INFO.epoch)
    assert release.outcome is ReleaseOutcome.CANCELLED


async def test_a_holder_that_cannot_be_told_is_left_to_its_lease() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unheard.getsockname()[1]}"
        assert not await _cancel(address, None, 0.2)
    assert not await _cancel("nowhere", None, 0.2)
