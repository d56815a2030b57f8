"""What prompts still lack."""

from __future__ import annotations

from kvferry.vllm_plugin.block_demand import BlockDemand
from tests.unit.vllm_plugin.fake_engine import BLOCK, FakeRequest


def _request(name: str, num_tokens: int) -> FakeRequest:
    return FakeRequest(name, list(range(num_tokens)))


def test_of_those_that_wait_the_largest_counts() -> None:
    demand = BlockDemand(BLOCK)
    demand.arrive(_request("a", 9))
    demand.arrive(_request("b", 17))
    assert (demand.num_waiting_blocks(), demand.num_running_blocks()) == (5, 0)


def test_of_those_that_run_each_counts_by_what_is_not_computed() -> None:
    demand = BlockDemand(BLOCK)
    a, b = _request("a", 9), _request("b", 17)
    for request in (a, b):
        demand.arrive(request)
        demand.admit(request)
    a.num_computed_tokens, b.num_computed_tokens = 8, 20
    assert (demand.num_waiting_blocks(), demand.num_running_blocks()) == (0, 1)


def test_who_was_preempted_waits_with_what_was_answered() -> None:
    demand = BlockDemand(BLOCK)
    request = _request("a", 9)
    demand.arrive(request)
    demand.admit(request)
    request.answer = [1] * 8
    demand.preempt("a")
    assert (demand.num_waiting_blocks(), demand.num_running_blocks()) == (5, 0)


def test_who_has_ended_needs_nothing() -> None:
    demand = BlockDemand(BLOCK)
    a, b = _request("a", 9), _request("b", 9)
    for request in (a, b):
        demand.arrive(request)
    demand.admit(a)
    demand.end("a")
    demand.end("b")
    demand.preempt("a")
    assert (demand.num_waiting_blocks(), demand.num_running_blocks()) == (0, 0)
