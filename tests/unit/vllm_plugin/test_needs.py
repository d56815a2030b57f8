"""What prompts still lack."""

from __future__ import annotations

from kvferry.vllm_plugin.needs import BlockNeeds
from tests.unit.vllm_plugin.fake_engine import BLOCK, FakeRequest


def _request(name: str, num_tokens: int) -> FakeRequest:
    return FakeRequest(name, list(range(num_tokens)))


def test_of_those_that_wait_the_largest_counts() -> None:
    needs = BlockNeeds(BLOCK)
    needs.arrive(_request("a", 9))
    needs.arrive(_request("b", 17))
    assert (needs.num_waiting_blocks(), needs.num_running_blocks()) == (5, 0)


def test_of_those_that_run_each_counts_by_what_is_not_computed() -> None:
    needs = BlockNeeds(BLOCK)
    a, b = _request("a", 9), _request("b", 17)
    for request in (a, b):
        needs.arrive(request)
        needs.admit(request)
    a.num_computed_tokens, b.num_computed_tokens = 8, 20
    assert (needs.num_waiting_blocks(), needs.num_running_blocks()) == (0, 1)


def test_who_was_preempted_waits_with_what_was_answered() -> None:
    needs = BlockNeeds(BLOCK)
    request = _request("a", 9)
    needs.arrive(request)
    needs.admit(request)
    request.answer = [1] * 8
    needs.preempt("a")
    assert (needs.num_waiting_blocks(), needs.num_running_blocks()) == (5, 0)


def test_who_has_ended_needs_nothing() -> None:
    needs = BlockNeeds(BLOCK)
    a, b = _request("a", 9), _request("b", 9)
    for request in (a, b):
        needs.arrive(request)
    needs.admit(a)
    needs.end("a")
    needs.end("b")
    needs.preempt("a")
    assert (needs.num_waiting_blocks(), needs.num_running_blocks()) == (0, 0)
