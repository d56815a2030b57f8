"""Orders over a real local socket."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.connector.ports import PromptIdentity
from kvferry.errors import EngineError
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.vllm_plugin.orders import Answer, MakeRoom, Offer, Order
from kvferry.vllm_plugin.worker_link import OrderClient, OrderServer
from tests.unit.vllm_plugin.fake_engine import blocks

_OFFER = Offer(RequestId("a"), TransferId("x"), PromptIdentity(4, b"d" * 32), blocks(1))


class _Executor:
    def __init__(self) -> None:
        self.seen: list[Order] = []
        self.arrived = threading.Event()

    def __call__(self, order: Order) -> Answer:
        if isinstance(order, MakeRoom) and order.num_blocks < 0:
            raise ValueError("a bug")
        self.seen.append(order)
        self.arrived.set()
        return Answer(lease_s=3.0)


def ask(client: OrderClient) -> Answer:
    client.send(_OFFER)
    return client.take_answer()


@pytest.fixture
def executor() -> _Executor:
    return _Executor()


@pytest.fixture
def server(executor: _Executor) -> Iterator[OrderServer]:
    server = OrderServer(executor)
    yield server
    server.close()


def test_an_answer_comes_after_all_orders_before_it(
    server: OrderServer, executor: _Executor
) -> None:
    client = OrderClient(server.path)
    client.send(MakeRoom(1))
    client.send(MakeRoom(2))
    assert ask(client) == Answer(lease_s=3.0)
    assert executor.seen == [MakeRoom(1), MakeRoom(2), _OFFER]
    client.close()


def test_a_bug_in_one_order_does_not_end_the_thread(server: OrderServer) -> None:
    client = OrderClient(server.path)
    client.send(MakeRoom(-1))
    assert ask(client).lease_s == 3.0
    client.close()


def test_nothing_is_left_in_the_file_system_once_joined(server: OrderServer) -> None:
    client = OrderClient(server.path)
    ask(client)
    assert not Path(server.path).parent.exists()
    client.close()


def test_a_worker_half_that_has_gone_is_an_engine_error(server: OrderServer) -> None:
    client = OrderClient(server.path)
    ask(client)
    server.close()
    with pytest.raises(EngineError, match="has gone"):
        ask(client)
    client.close()


def test_a_worker_half_that_was_never_there_is_an_engine_error(server: OrderServer) -> None:
    server.close()
    with pytest.raises(EngineError, match="not there"):
        OrderClient(server.path)


def test_closing_without_anyone_having_come_removes_the_socket(executor: _Executor) -> None:
    server = OrderServer(executor)
    server.close()
    server.close()
    assert not Path(server.path).parent.exists()


def test_a_thread_that_has_ended_by_itself_is_an_engine_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def end(order: Order) -> Answer:
        raise SystemExit

    server = OrderServer(end)
    client = OrderClient(server.path)
    server.check()
    with pytest.raises(EngineError, match="has gone"):
        ask(client)
    for thread in threading.enumerate():
        if thread.name == "kvferry-orders":
            thread.join(10.0)
    with pytest.raises(EngineError, match="takes no orders any more"):
        server.check()
    server.close()
    server.check()
    client.close()


def test_the_socket_is_for_this_user_only(server: OrderServer) -> None:
    path = Path(server.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
