"""Which requests vLLM parks, and what it is told of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import EngineError
from kvferry.protocol.compatibility import Compatibility, KVLayout
from kvferry.protocol.ids import RequestId
from kvferry.transport.base import MemoryRegion
from kvferry.vllm_plugin import worker_half
from kvferry.vllm_plugin.orders import FillEnd, MakeRoom, Order, StepOrders
from kvferry.vllm_plugin.settings import PluginSettings
from kvferry.vllm_plugin.worker_half import ParkedRequests, WorkerHalf
from kvferry.vllm_plugin.worker_link import OrderClient
from tests.own_key import own_key
from tests.support.memory_transport import MemoryHub, MemoryTransport
from tests.unit.vllm_plugin.fake_engine import blocks

_A = RequestId("a")


def _parked() -> ParkedRequests:
    parked = ParkedRequests()
    parked.add({_A: blocks(4, 5, 6)})
    return parked


def test_a_filled_request_is_told_once() -> None:
    parked = _parked()
    assert parked.take(set()).finished == set()
    parked.note([FillEnd(_A, "received", num_blocks=3)])
    told = parked.take(set())
    assert (told.finished, told.failed, told.unfilled_blocks) == ({"a"}, set(), set())
    assert parked.take(set()).finished == set()
    assert parked.num_parked == 0


def test_an_end_may_come_before_the_step_that_parks() -> None:
    parked = ParkedRequests()
    parked.note([FillEnd(_A, "received", num_blocks=3)])
    assert parked.take(set()).finished == set()
    parked.add({_A: blocks(4, 5, 6)})
    assert parked.take(set()).finished == {"a"}


def test_a_failed_one_is_told_as_failed_and_as_finished() -> None:
    parked = _parked()
    parked.note([FillEnd(_A, "slow")])
    told = parked.take(set())
    assert (told.finished, told.failed) == ({"a"}, {"a"})


def test_of_one_that_was_filled_in_part_the_rest_is_named() -> None:
    parked = _parked()
    parked.note([FillEnd(_A, "received", num_blocks=1)])
    told = parked.take(set())
    assert (told.finished, told.failed) == ({"a"}, set())
    assert told.unfilled_blocks == {5, 6}


def test_a_partial_block_is_named_as_not_filled_and_reported_with_it() -> None:
    parked, end = _parked(), FillEnd(_A, "received", num_blocks=1, num_partial_tokens=3)
    parked.note([end])
    assert parked.take_reports() == (), "vLLM has not been told"
    assert parked.take(set()).unfilled_blocks == {5, 6}
    assert parked.take_reports() == (end,)
    assert parked.take_reports() == ()


def test_what_was_received_is_reported_once_vllm_has_parked_the_request() -> None:
    parked, end = ParkedRequests(), FillEnd(_A, "received", num_blocks=3)
    parked.note([end])
    parked.take(set())
    assert parked.take_reports() == ()
    parked.add({_A: blocks(4, 5, 6)})
    parked.take(set())
    assert parked.take_reports() == (end,)


def test_a_failure_is_reported_at_once_and_once() -> None:
    """A push may fail before its request has blocks, and is not parked then."""
    parked, end = ParkedRequests(), FillEnd(_A, "gone")
    parked.note([end])
    assert parked.take_reports() == (end,)
    parked.add({_A: blocks(4)})
    assert parked.take(set()).failed == {"a"}
    assert parked.take_reports() == ()


def test_the_end_of_an_aborted_one_is_reported_too() -> None:
    parked, end = _parked(), FillEnd(_A, "received", num_blocks=1, num_partial_tokens=3)
    parked.note([end])
    assert parked.take({"a"}).unfilled_blocks == set()
    assert parked.take_reports() == (end,)


def test_an_aborted_one_is_finished_so_that_its_blocks_are_freed() -> None:
    parked = _parked()
    assert parked.take({"a"}).finished == {"a"}
    parked.note([FillEnd(_A, "received", num_blocks=3)])
    assert parked.take(set()).finished == set()


def test_one_that_was_aborted_just_when_it_failed_is_only_finished() -> None:
    parked = _parked()
    parked.note([FillEnd(_A, "received", num_blocks=1)])
    told = parked.take({"a"})
    assert (told.finished, told.failed, told.unfilled_blocks) == ({"a"}, set(), set())


def test_requests_that_end_without_having_been_parked_are_not_told() -> None:
    parked = ParkedRequests()
    parked.note([FillEnd(_A, "failed")])
    assert parked.take({"a"}).finished == set()
    parked.add({_A: blocks(1)})
    assert parked.take(set()).finished == set()


_BLOCK_BYTES = 64
_LAYOUT = KVLayout("m", "w", "c", "float32", 1, 1, 1, 4, _BLOCK_BYTES, "test", (_BLOCK_BYTES,))


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerHalf]:
    """A real one over memory of this process."""
    memory = np.zeros(8 * _BLOCK_BYTES, np.uint8)
    monkeypatch.setattr(worker_half, "_create_transport", lambda *_: MemoryTransport(MemoryHub()))
    settings = PluginSettings()
    region = MemoryRegion(memory.ctypes.data, _BLOCK_BYTES, _BLOCK_BYTES, 8)
    half = WorkerHalf(settings.exchange_config("e"), settings, _LAYOUT, Compatibility(), [region])
    yield half
    half.close()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that the worker half writes, from its start on."""
    lines: list[str] = []
    monkeypatch.setattr(worker_half._log, "info", lambda text, *values: lines.append(text % values))
    return lines


def test_the_log_tells_all_that_names_an_instance_to_its_peers(
    log: list[str], half: WorkerHalf
) -> None:
    peer = half.hello.address
    assert log == [
        f"instance {peer.instance_id}, epoch {peer.epoch}, answers on {peer.control_address}",
        f"the control port takes {own_key().user_file}",
    ]


def test_a_step_without_news_reports_nothing(half: WorkerHalf) -> None:
    half.begin_step(StepOrders(1, is_waiting=True))
    assert half.take_ends(set()).finished == set()
    assert half.report() is None


def test_a_worker_whose_orders_nobody_takes_ends_the_engine(
    half: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(order: Order) -> None:
        raise SystemExit

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr("kvferry.vllm_plugin.worker_link.decode_order", end)
    client = OrderClient(half.hello.orders_path)
    client.send(MakeRoom(1))
    for thread in threading.enumerate():
        if thread.name == "kvferry-orders":
            thread.join(10.0)
    with pytest.raises(EngineError, match="takes no orders"):
        half.begin_step(StepOrders(1))
    client.close()
