"""Handoffs over HTTP: how long the prompts are, what is told of them, why they fail."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.doctor import handoffs
from kvferry.doctor.facts import HandoffPlan, InstanceFacts, PairFacts
from kvferry.doctor.handoff_checks import speed_of
from kvferry.doctor.handoffs import (
    MAX_FURTHER_SAMPLES,
    HandoffProbe,
    Lengths,
    lengths_of,
)
from kvferry.protocol.keys import UserKeyFile
from kvferry.protocol.messages import Release
from tests.unit.client.served_control_port import Serve, with_info
from tests.unit.doctor.deployment_facts import LAYOUT, MIB, info_of, instance_of, with_http
from tests.unit.doctor.fake_instance import FakeInstance, Json, offering_as, reporting, served


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "wanted", "expected"),
    [
        (16, 1000, 1024, Lengths(short=81, long=1025)),
        (128, 1000, 1024, Lengths(short=129, long=1025)),
        (16, 100, 1024, Lengths(short=81, long=321)),
        (16, 20, 1024, None),
    ],
    ids=["small blocks", "vLLM's blocks", "small pool", "too small a pool"],
)
def test_whole_blocks_and_one_token_that_fit_the_pool(
    block_size: int, num_blocks: int, wanted: int, expected: Lengths | None
) -> None:
    layout = msgspec.structs.replace(LAYOUT, block_size_tokens=block_size)
    source = instance_of(info_of("prefill", layout))
    target = instance_of(info_of("decode", layout, num_blocks=num_blocks))
    for one, other in ((source, target), (target, source)):
        assert lengths_of(HandoffPlan(num_tokens=wanted), one, other) == expected


def test_prompts_leave_room_for_an_answer() -> None:
    instance = instance_of(info_of("prefill"))
    short = with_http(instance, replace(instance.http, max_model_len=200))
    assert lengths_of(HandoffPlan(), short, instance) == Lengths(short=81, long=193)


def _facts(instance: FakeInstance, name: str) -> InstanceFacts:
    """The instance as asked: on its control port, and over HTTP where it shows itself."""
    found = instance_of(info_of(name))
    http = replace(found.http, info=instance.info, user_key=instance.user_key)
    return replace(found, url=instance.url, http=http)


async def _measure(
    source: FakeInstance,
    target: FakeInstance,
    key: bytes | None = None,
    source_address: str = "tcp://127.0.0.1:1",
) -> PairFacts:
    plan = HandoffPlan(num_tokens=256, repeats=2, timeout_s=30)
    async with served(source, target, key=key) as questions:
        make = functools.partial(HandoffProbe, questions=questions, plan=plan, cluster_key=key)
        asked = _facts(source, "prefill")
        assert asked.control is not None
        asked = replace(asked, control=replace(asked.control, address=source_address))
        probe = make(rng=random.Random(1), source=asked, target=_facts(target, "decode"))
        return await probe.measure()


def _own(name: str, **changes: Any) -> FakeInstance:  # noqa: ANN401 - fields of FakeInstance
    return FakeInstance(info=info_of(name), **changes)


MOVED = reporting(arrived_s=1.0, kv_ready_s=1.5, num_received_bytes=999, receive_outcome="received")


async def test_reported_handoffs_tell_bytes_and_times() -> None:
    source, target = _own("prefill"), _own("decode", decode=MOVED)
    pair = await _measure(source, target)
    assert (pair.error, pair.outcome) == ("", "")
    assert [len(pair.short), len(pair.long)] == [2, 2]
    assert {(item.num_bytes, item.moved_s, item.is_reported) for item in pair.long} == {
        (999, 0.5, True)
    }
    lengths = [len(body["prompt"]) for body in target.bodies]
    assert lengths == [81, 81, 257, 81, 257]
    assert all(body["kv_transfer_params"]["retention_s"] == 0 for body in target.bodies)
    salts = {body["cache_salt"] for body in source.bodies}
    assert len(salts) == len(source.bodies)


async def test_legs_are_signed_with_the_key() -> None:
    source, target = _own("prefill"), _own("decode", decode=MOVED)
    await _measure(source, target, key=b"k" * 32)
    for headers in source.headers + target.headers:
        assert "id=xfer-" in headers["X-Kvferry-Signature"]


async def test_a_failed_receive_is_named_and_the_source_told() -> None:
    late = reporting(arrived_s=1.0, receive_outcome="slow")
    source = _own("prefill")
    pair = await _measure(source, _own("decode", decode=late))
    assert (pair.outcome, pair.long) == ("slow", ())
    assert source.withdrawn == [source.bodies[0]["kv_transfer_params"]["transfer_id"]]


async def test_a_target_that_computes_itself_is_told_of_its_threshold() -> None:
    pair = await _measure(_own("prefill"), _own("decode", decode=reporting(arrived_s=1.0)))
    assert "computed 257 tokens itself" in pair.error
    assert "recompute threshold" in pair.remedy


@pytest.mark.parametrize(
    ("key", "remedy"), [(None, "give the instances' cluster key"), (b"k" * 32, "clocks")]
)
async def test_ignored_parameters_are_traced_to_the_key(key: bytes | None, remedy: str) -> None:
    deaf = _own("prefill", prefill=lambda _: {})
    pair = await _measure(deaf, _own("decode"), key)
    assert "ignored" in pair.error
    assert remedy in pair.remedy


async def test_ignored_parameters_are_traced_to_vllms_connector() -> None:
    pair = await _measure(FakeInstance(prefill=lambda _: {}), _own("decode"))
    assert "FerryConnector" in pair.remedy


async def test_an_error_is_shown_and_what_is_held_withdrawn() -> None:
    source = _own("prefill")
    pair = await _measure(source, _own("decode", status=500))
    assert "decode answered 500: it burns" in pair.error
    assert source.withdrawn == [source.bodies[0]["kv_transfer_params"]["transfer_id"]]


@pytest.mark.parametrize("answer", [{}, {"kv_report": None}, {"kv_report": {"arrived_s": "x"}}])
async def test_an_answer_without_a_report_is_an_error(answer: Json) -> None:
    pair = await _measure(_own("prefill"), _own("decode", decode=lambda _: answer))
    assert "kv_report" in pair.error


async def test_vllm_is_timed_by_the_client_and_counted_by_its_metrics() -> None:
    target = FakeInstance(counts="received", receives={"slow": 3})
    pair = await _measure(FakeInstance(), target)
    assert (pair.error, pair.outcome) == ("", "")
    assert [item.is_reported for item in pair.short + pair.long] == [False] * 4
    blocks = 17
    assert {item.num_bytes for item in pair.long} == {blocks * LAYOUT.block_bytes}
    assert len(target.bodies) == 2 * 5
    assert not any("kv_report" in body for body in target.bodies)


async def test_nothing_of_a_prompt_is_retained_at_vllm() -> None:
    source, target = FakeInstance(), FakeInstance(counts="received")
    await _measure(source, target)
    legs = [body["kv_transfer_params"] for body in target.bodies]
    assert {(leg["role"], leg["retention_s"]) for leg in legs} == {("decode", 0)}
    offered = [body["kv_transfer_params"]["transfer_id"] for body in source.bodies]
    assert [leg["transfer_id"] for leg in legs] == offered
    assert len(set(offered)) == len(offered)


async def test_an_offer_that_vllm_did_not_take_is_released_at_its_holder(serve: Serve) -> None:
    releases: list[Release] = []
    address = serve(None, with_info(info_of("prefill"), releases))
    # The address where the doctor has had an answer: the advertised one may be for peers only.
    source = FakeInstance(prefill=offering_as(info_of("prefill", control_address="tcp://far:1")))
    pair = await _measure(source, FakeInstance(status=500), source_address=address)
    assert "answered 500" in pair.error
    offered = [body["kv_transfer_params"]["transfer_id"] for body in source.bodies]
    assert [release.transfer_id for release in releases] == offered
    assert not source.withdrawn


async def test_another_instance_than_the_control_ports_is_not_measured(serve: Serve) -> None:
    releases: list[Release] = []
    address = serve(None, with_info(info_of("decode"), releases))
    source = FakeInstance(prefill=offering_as(info_of("decode", control_address=address)))
    target = FakeInstance(counts="received")
    pair = await _measure(source, target)
    assert pair.answered_by is not None
    assert pair.answered_by.instance_id == "decode"
    assert (pair.error, pair.outcome, pair.short, target.bodies) == ("", "", (), [])
    assert len(releases) == 1


def _moving(*long_s: float) -> FakeInstance:
    """Reports handoffs of 32 MiB beyond a short one, whose times are ``long_s`` and then the last
    of them."""
    taken = list(long_s)

    def report(body: Json) -> Json:
        is_long = len(body["prompt"]) > 81
        moved_s = (taken.pop(0) if len(taken) > 1 else taken[0]) if is_long else 0.002
        return reporting(
            arrived_s=1.0,
            kv_ready_s=1.0 + moved_s,
            num_received_bytes=(33 if is_long else 1) * MIB,
            receive_outcome="received",
        )(body)

    return _own("decode", decode=report)


async def test_a_direction_that_seems_slow_is_tried_again_until_it_is_not() -> None:
    pair = await _measure(_own("prefill"), _moving(0.1, 0.1, 0.1, 0.005))
    assert len(pair.long) == 4
    speed = speed_of(pair)
    assert speed is not None
    assert speed.bytes_per_s > 1e10


async def test_a_slow_direction_is_tried_again_within_bounds() -> None:
    pair = await _measure(_own("prefill"), _moving(0.1))
    assert (len(pair.short), len(pair.long)) == (2, 2 + MAX_FURTHER_SAMPLES)


async def test_what_vllm_counts_as_failed_is_named() -> None:
    pair = await _measure(FakeInstance(), FakeInstance(counts="unreachable"))
    assert pair.outcome == "unreachable"


async def test_a_vllm_that_counts_nothing_is_asked_for_its_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoffs, "_COUNT_WAIT_S", 0.05)
    pair = await _measure(FakeInstance(), FakeInstance())
    assert "counts no receive" in pair.error
    assert "FerryConnector" in pair.remedy


async def test_ignored_parameters_are_traced_to_another_users_key() -> None:
    file = UserKeyFile("/home/a/user-key", 7, "id")
    pair = await _measure(_own("prefill", prefill=lambda _: {}, user_key=file), _own("decode"))
    assert "--cluster-key-file /home/a/user-key, the key of uid 7" in pair.remedy


async def test_what_is_held_is_withdrawn_with_a_signature() -> None:
    source = _own("prefill")
    await _measure(source, _own("decode", status=500), b"k" * 32)
    (withdrawn,) = source.withdrawn
    assert f"id={withdrawn}," in source.headers[-1]["X-Kvferry-Signature"]
