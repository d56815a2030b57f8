"""The way from the scheduler half to the worker halves: a local socket to each, framed, in order.

All are on one host, mostly in processes of their own. A socket lies in a folder that only this user
may enter. Messages are msgpack, never pickled.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

import msgspec

from kvferry.errors import EngineError, LocalProtocolError
from kvferry.observe.log import get_logger
from kvferry.protocol.ids import BlockNumber, RequestId
from kvferry.vllm_plugin.orders import (
    ANSWERED,
    Answer,
    CompleteSend,
    FillEnd,
    Offer,
    Order,
    StepReport,
    Withdraw,
    WorkerHello,
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

    def __init__(self, execute: Callable[[Order], Answer]) -> None:
        self._execute = execute
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
        """Take no more orders and remove the socket. Safe to repeat."""
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
            # There is one scheduler half: whoever comes later finds nothing, and a process that is
            # killed leaves nothing behind.
            self._socket.close()
            self._socket = connection
            if self._is_closed:
                raise ConnectionError("closed meanwhile")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take_one(self) -> None:
        data = _receive(self._socket)
        is_answered = True
        try:
            order = decode_order(data)
            is_answered = isinstance(order, ANSWERED)
            answer = self._execute(order)
        except Exception as error:  # noqa: BLE001 - one order's bug must not end the thread
            answer = Answer(error=f"a bug in kvferry: {error}")
            _log.exception("the plugin failed: a bug in kvferry")
        if is_answered:
            _send(self._socket, encode(answer))


class OrderClient:
    """The scheduler half's end of one socket."""

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

    def take_answer(self) -> Answer:
        """Wait for the answer to an order of ``ANSWERED``. Raises as ``send``."""
        try:
            return decode_answer(_receive(self._socket))
        except (OSError, msgspec.MsgspecError) as error:
            raise EngineError(f"the worker half of the plugin has gone: {error}") from error

    def close(self) -> None:
        """End the connection. Safe to repeat."""
        self._socket.close()


class Workers:
    """The worker halves of all tensor-parallel ranks, as one. Called from the scheduler's thread.

    Each rank has its shard of every block, an exchange of its own, and moves that shard with the
    peer's worker of the same rank. So an order goes to all of them, a block is free when none of
    them counts it, and a receive has ended when it has on all. ``clients`` are by rank; ``hello``
    is rank 0's, by whose address a peer finds the others.
    """

    def __init__(self, hello: WorkerHello, clients: Sequence[OrderClient]) -> None:
        self.hello = hello
        self._clients = clients
        self._returned = [Counter[BlockNumber]() for _ in clients]
        """By rank: pins that the slowest of the others still has."""
        self._ends: dict[RequestId, dict[int, FillEnd]] = {}
        """By request and rank: ends that some rank has told and another has not."""

    @classmethod
    def connect(cls, hellos: Sequence[WorkerHello]) -> Workers:
        """Connect to the worker halves. Raises ``EngineError`` unless all ``hellos``, by rank, are
        one instance's."""
        first = hellos[0]
        for rank, hello in enumerate(hellos):
            expected = first.address.of_rank(rank)
            if (hello.address, hello.num_blocks) != (expected, first.num_blocks):
                raise EngineError(
                    f"rank {rank} is {hello.address} with {hello.num_blocks} blocks, not "
                    f"{expected} with {first.num_blocks}"
                )
        return cls(first, [OrderClient(hello.orders_path) for hello in hellos])

    def send(self, order: Order) -> None:
        """Pass an order on to all. Raises ``EngineError`` if any of them has gone."""
        for client in self._clients:
            client.send(order)

    def ask(self, order: Order) -> Answer:
        """Pass on an order of ``ANSWERED``; return the shortest lease, or an error if any has one.

        What only some ranks hold then nobody could read: they give it up.
        """
        self.send(order)
        answers = [client.take_answer() for client in self._clients]
        if len(answers) == 1:
            return answers[0]
        if any(answer.error for answer in answers) and isinstance(order, Offer | CompleteSend):
            for client, answer in zip(self._clients, answers, strict=True):
                if not answer.error:
                    client.send(Withdraw(order.request_id, order.transfer_id))
        returned: list[BlockNumber] = []
        for rank, answer in enumerate(answers):
            returned += self._give_back(rank, answer.returned)
        return Answer(
            lease_s=min(answer.lease_s for answer in answers),
            error="; ".join(f"rank {rank}: {a.error}" for rank, a in enumerate(answers) if a.error),
            returned=tuple(returned),
        )

    def join(self, reports: Mapping[int, StepReport], known: Container[str]) -> StepReport:
        """Return one report for those of one step, by rank; a rank without news has none.

        Of a request that is not ``known`` nobody waits for the end, and nothing is kept.
        """
        if len(self._clients) == 1:
            return reports[0]
        returned: list[BlockNumber] = []
        admitted: dict[RequestId, None] = {}
        ends: list[FillEnd] = []
        for rank, report in reports.items():
            returned += self._give_back(rank, report.returned)
            # The peer's scheduler admits a prefill once, for all of its ranks.
            admitted.update(dict.fromkeys(report.admitted))
            for end in report.ends:
                self._ends.setdefault(end.request_id, {})[rank] = end
        for request_id, by_rank in list(self._ends.items()):
            if len(by_rank) == len(self._clients):
                ends.append(joined_end(by_rank))
            if len(by_rank) == len(self._clients) or request_id not in known:
                del self._ends[request_id]
        step = max(report.step for report in reports.values())
        return StepReport(step, tuple(returned), tuple(ends), tuple(admitted))

    def close(self) -> None:
        """End all connections. Safe to repeat."""
        for client in self._clients:
            client.close()

    def _give_back(self, rank: int, blocks: Sequence[BlockNumber]) -> list[BlockNumber]:
        """``rank`` returns one pin for each entry; return those that all ranks have returned."""
        whole = []
        self._returned[rank].update(blocks)
        for block in blocks:
            if all(returned[block] for returned in self._returned):
                whole.append(block)
                for returned in self._returned:
                    returned[block] -= 1
                    if not returned[block]:
                        del returned[block]
        return whole


def joined_end(ends: Mapping[int, FillEnd]) -> FillEnd:
    """Return how filling one request's blocks has ended on all ranks together.

    It is received if it was everywhere, up to what the rank with the least has; else the end is
    that of the first rank that failed. A partial block counts if every rank has the same of it:
    then none lacks a token.
    """
    for rank, end in sorted(ends.items()):
        if not end.is_received:
            return msgspec.structs.replace(end, detail=f"rank {rank}: {end.detail}", num_blocks=0)
    least = min(ends.values(), key=lambda end: (end.num_blocks, end.num_partial_tokens))
    filled = {(end.num_blocks, end.num_partial_tokens) for end in ends.values()}
    return msgspec.structs.replace(
        least,
        num_partial_tokens=least.num_partial_tokens if len(filled) == 1 else 0,
        num_bytes=sum(end.num_bytes for end in ends.values()),
    )


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
