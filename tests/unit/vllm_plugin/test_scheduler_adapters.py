"""Requests to LoRA adapters in the scheduler half: by content, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.protocol.hashing import chain_root, prompt_digest
from kvferry.vllm_plugin.orders import (
    Begin,
    BeginSend,
    CompleteSend,
    Contact,
    FillHistory,
    Offer,
    Retain,
    Withdraw,
)
from tests.unit.vllm_plugin.adapter_files import FakeAdapter, write_adapter
from tests.unit.vllm_plugin.fake_engine import HELLO, FakeRequest
from tests.unit.vllm_plugin.scheduler_rig import PEER_FIELDS, SchedulerRig

DECODE: dict[str, object] = {"role": "decode", "peer": PEER_FIELDS}
PREFILL: dict[str, object] = {"role": "prefill"}
NO_FOLDER = FakeAdapter("org/adapter")


def ask(rig: SchedulerRig, adapter: FakeAdapter, **params: object) -> FakeRequest:
    request = FakeRequest("r", list(range(10)), lora_request=adapter)
    if params:
        request.kv_transfer_params = {"transfer_id": "x", **params}
    rig.half.add(request, is_supported=True)
    return request


def end(rig: SchedulerRig, request: FakeRequest) -> dict[str, object] | None:
    """Have it computed and answered."""
    rig.allocate(request, 0, 4, external=0)
    request.answer, request.num_computed_tokens = [1, 2, 3], 12
    rig.orders.sent = [o for o in rig.orders.sent if not isinstance(o, Begin | Contact)]
    return rig.end(request)


def ordered(rig: SchedulerRig, *kinds: type) -> list[type]:
    return [type(order) for order in rig.orders.take() if isinstance(order, kinds)]


def test_a_prompt_is_known_by_the_adapters_content(tmp_path: Path) -> None:
    digests = set()
    for name, weights in (("p", b"one"), ("q", b"one"), ("r", b"two")):
        rig = SchedulerRig()
        adapter = FakeAdapter(write_adapter(tmp_path / name, weights))
        request = ask(rig, adapter, **DECODE)
        (begin,) = rig.orders.take()
        assert isinstance(begin, Begin)
        root = chain_root(HELLO.fingerprint, lora=rig.adapters.digest(adapter))
        assert begin.prompt.digest == prompt_digest(root, request.prompt_token_ids or [])
        digests.add(begin.prompt.digest)
    assert len(digests) == 2


def test_without_content_nothing_is_received_offered_read_back_or_retained() -> None:
    rig = SchedulerRig()
    request = ask(rig, NO_FOLDER, **DECODE)
    assert rig.half.count_external(request, 0) == 0
    assert end(rig, request) is None
    request = ask(rig, NO_FOLDER, **PREFILL, history=PEER_FIELDS)
    assert request.max_tokens == 1, "the router waits for the end of a prefill"
    assert rig.half.count_external(request, 0) == 0
    assert end(rig, request) is None
    assert end(rig, ask(rig, NO_FOLDER)) is None
    assert not ordered(rig, Begin, Contact, FillHistory, Offer, Retain)
    assert not rig.pool.held()


def test_a_push_without_content_is_nobodys_prompt_and_is_withdrawn() -> None:
    digests = set()
    for _ in range(2):
        rig = SchedulerRig()
        request = ask(rig, NO_FOLDER, **PREFILL, mode="push")
        rig.allocate(request, 0, 4, external=0)
        (begin,) = rig.orders.take()
        assert isinstance(begin, BeginSend)
        digests.add(begin.prompt.digest)
        request.answer = [1]
        assert rig.end(request) is None
        assert ordered(rig, Withdraw, CompleteSend) == [Withdraw]
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("params", "kept"),
    [({}, Retain), (DECODE, Retain), (PREFILL, Offer), ({**PREFILL, "mode": "push"}, CompleteSend)],
)
def test_what_ran_while_other_weights_came_in_place_is_kept_for_nobody(
    tmp_path: Path, params: dict[str, object], kept: type
) -> None:
    for changes in (False, True):
        rig = SchedulerRig()
        adapter = FakeAdapter(write_adapter(tmp_path / "p", b"one"))
        request = ask(rig, adapter, **params)
        if changes:
            write_adapter(tmp_path / "p", b"two")
        offered = end(rig, request)
        assert ordered(rig, kept) == ([] if changes else [kept])
        assert (offered is not None) == ("prefill" in params.values() and not changes)


def test_a_plain_request_alone_makes_the_old_weights_known(tmp_path: Path) -> None:
    rig = SchedulerRig()
    path = write_adapter(tmp_path / "p", b"one")
    end(rig, ask(rig, FakeAdapter(path)))
    rig.orders.take()
    write_adapter(tmp_path / "p", b"two")
    # vLLM's own cache gives this one KV of the old weights.
    reloaded = FakeAdapter(path, load_inplace=True)
    assert end(rig, ask(rig, reloaded, **PREFILL)) is None
    assert not ordered(rig, Offer)
