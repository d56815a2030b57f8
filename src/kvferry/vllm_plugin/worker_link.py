"""Orders from the scheduler half to the worker half: a local socket, framed, in order.

Both halves are on one host, mostly in two processes. The socket lies in a folder that only this
user may enter. Messages are msgpack, never pickled.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvferry.errors import EngineError, FerryError, LocalProtocolError
from kvferry.observe.log import get_logger
from kvferry.vllm_plugin.orders import (
    ANSWERED,
    Answer,
    Order,
    decode_answer,
    decode_order,
    encode,
)

ANSWER_TIMEOUT_S = 60.0
"""For the worker half's thread to get its turn; it waits for nobody else. Only a stopped process
takes so long, and vLLM itself waits for that one without end."""
MAX_ORDER_BYTES = 64 * 1024 * 1024
_HEADER_BYTES = 4
_CLOSE_TIMEOUT_S = 5.0
_log = get_logger(__name__)


class OrderServer:
    """The worker half's end: a thread that passes each order on and answers where asked."""

    def __init__(self, obey: Callable[[Order], Answer]) -> None:
        self._obey = obey
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-"))
        self.path = str(self._folder / "orders")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        Path(self.path).chmod(0o600)
        self._socket.listen(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvferry-orders", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise ``EngineError`` if the thread has ended by itself: orders would wait for ever."""
        if not (self._thread.is_alive() or self._is_closed):
            raise EngineError("the plugin takes no orders any more: its thread has ended")

    def close(self) -> None:
        """Stop obeying and remove the socket. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            # Wakes the thread, whichever of its two sockets it waits for.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._accept()
            while True:
                self._take_one()
        except OSError as error:
            if not self._is_closed:
                _log.info("the scheduler half has gone: %s", error)
        finally:
            with self._lock:
                self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        with self._lock:
            # There is one scheduler half: whoever comes later finds nothing, nor is anything left
            # behind by a process that is killed.
            self._socket.close()
            self._socket = connection
            if self._is_closed:
                raise ConnectionError("closed meanwhile")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take_one(self) -> None:
        data = _receive(self._socket)
        is_answered, answer = True, Answer()
        try:
            order = decode_order(data)
            is_answered = isinstance(order, ANSWERED)
            answer = self._obey(order)
        except (msgspec.MsgspecError, FerryError) as error:
            answer = Answer(error=str(error))
            _log.error("an order could not be obeyed: %s", error)
        except Exception as error:  # noqa: BLE001 - one order's bug must not end the thread
            answer = Answer(error=f"a bug in kvferry: {error}")
            _log.exception("the plugin failed: a bug in kvferry")
        if is_answered:
            _send(self._socket, encode(answer))


class OrderClient:
    """The scheduler half's end. Called from the scheduler's thread only."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise EngineError(f"the worker half of the plugin is not there: {error}") from error

    def send(self, order: Order) -> None:
        """Pass an order on. Raises ``EngineError`` if the worker half has gone or takes none."""
        try:
            _send(self._socket, encode(order))
        except OSError as error:
            raise EngineError(f"the worker half of the plugin has gone: {error}") from error

    def ask(self, order: Order) -> Answer:
        """Pass on an order of ``ANSWERED`` and return its answer. Raises as ``send``."""
        self.send(order)
        return self.take_answer()

    def take_answer(self) -> Answer:
        """Wait for the answer to an order of ``ANSWERED``. Raises as ``send``."""
        try:
            return decode_answer(_receive(self._socket))
        except (OSError, msgspec.MsgspecError) as error:
            raise EngineError(f"the worker half of the plugin has gone: {error}") from error

    def close(self) -> None:
        """End the connection. Safe to repeat."""
        self._socket.close()


def _send(connection: socket.socket, data: bytes) -> None:
    if len(data) > MAX_ORDER_BYTES:
        raise LocalProtocolError(f"an order of {len(data)} bytes exceeds {MAX_ORDER_BYTES}")
    connection.sendall(len(data).to_bytes(_HEADER_BYTES, "little") + data)


def _receive(connection: socket.socket) -> bytearray:
    size = int.from_bytes(_receive_exactly(connection, _HEADER_BYTES), "little")
    if size > MAX_ORDER_BYTES:
        raise ConnectionError(f"an order of {size} bytes exceeds {MAX_ORDER_BYTES}")
    return _receive_exactly(connection, size)


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the other half has closed")
        view = view[count:]
    return data
