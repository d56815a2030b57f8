"""What is found of handoffs, and of this host's limits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvferry.doctor.deployment_checks import findings_of
from kvferry.doctor.facts import HandoffSample, HostFacts, HttpFacts, InstanceFacts, PairFacts
from kvferry.doctor.finding import Finding, Result
from kvferry.doctor.handoff_checks import speed_of, speed_words
from tests.unit.doctor.deployment_facts import (
    LAYOUT,
    MIB,
    info_of,
    instance_of,
    not_ok,
    only_finding,
    pair_of,
    sample,
    well,
)

PREFILL = instance_of(info_of("prefill"))
DECODE = instance_of(info_of("decode"))
NO_LIMITS = HostFacts(ptrace_scope=0, locked_memory_bytes=None)


def _pair(*, short: float, long: float, is_reported: bool = True) -> PairFacts:
    return PairFacts(
        source_url=PREFILL.url,
        target_url=DECODE.url,
        short=(sample(MIB, short, is_reported=is_reported),),
        long=(sample(33 * MIB, long, is_reported=is_reported),),
    )


def test_the_bandwidth_is_of_the_bytes_beyond_the_short_prompt() -> None:
    speed = speed_of(_pair(short=0.002, long=0.002 + 32 * MIB / 4e9))
    assert speed is not None
    assert (speed.latency_s, speed.is_lower_bound) == (0.002, False)
    assert speed.bytes_per_s == pytest.approx(4e9)
    assert speed_words(speed) == "2.0 ms a handoff, then 4.0 GB/s (34.6 MB moved)"


def test_the_fastest_of_each_length_counts() -> None:
    pair = _pair(short=0.002, long=0.010)
    slower = replace(pair, short=(sample(MIB, 1.0), *pair.short), long=(*pair.long, sample(1, 2.0)))
    assert speed_of(slower) == speed_of(pair)


def test_lengths_that_take_the_same_tell_a_lower_bound() -> None:
    speed = speed_of(_pair(short=0.010, long=0.010))
    assert speed is not None
    assert speed.is_lower_bound
    assert speed.bytes_per_s == pytest.approx(33 * MIB / 0.010)
    assert "at least 3.5 GB/s" in speed_words(speed)


def test_the_clients_times_have_to_differ_by_more_than_their_noise() -> None:
    near = speed_of(_pair(short=0.005, long=0.012, is_reported=False))
    far = speed_of(_pair(short=0.005, long=0.100, is_reported=False))
    assert near is not None
    assert far is not None
    assert (near.is_lower_bound, far.is_lower_bound) == (True, False)
    assert "under 5 ms" in speed_words(near)
    assert "by the client's times" in speed_words(near)


def test_only_long_prompts_moved_tell_a_lower_bound_without_a_latency() -> None:
    speed = speed_of(replace(_pair(short=1.0, long=0.010), short=()))
    assert speed is not None
    assert speed.latency_s is None
    assert speed_words(speed).startswith("at least")


def test_nothing_moved_has_no_speed() -> None:
    assert speed_of(replace(_pair(short=1.0, long=1.0), short=(), long=())) is None


def test_a_slow_pair_on_one_host_is_warned_of_tcp() -> None:
    facts = well(pairs=(pair_of(PREFILL, DECODE, 1e9), pair_of(DECODE, PREFILL)))
    finding = only_finding(facts, Result.WARNING)
    assert finding.subject == "prefill → decode"
    assert "1.0 GB/s" in finding.found
    assert "may go by TCP" in finding.found
    assert finding.remedy.startswith("the host may be busy, so repeat with --repeats 5")
    assert "ptrace_scope" in finding.remedy


def test_a_slow_pair_where_processes_may_not_read_each_other_is_told_that_first() -> None:
    host = HostFacts(ptrace_scope=1, locked_memory_bytes=None)
    facts = well(host=host, pairs=(pair_of(PREFILL, DECODE, 1e9),))
    (finding,) = [item for item in not_ok(facts) if item.check == "handoff"]
    assert finding.remedy.startswith("allow cross-memory attach")


def test_the_clients_times_are_not_expected_to_be_as_fast() -> None:
    def timed(samples: tuple[HandoffSample, ...]) -> tuple[HandoffSample, ...]:
        return tuple(replace(item, is_reported=False) for item in samples)

    def measured(bytes_per_s: float) -> PairFacts:
        pair = pair_of(PREFILL, DECODE, bytes_per_s)
        return replace(pair, short=timed(pair.short), long=timed(pair.long))

    assert not not_ok(well(pairs=(measured(3e9),)))
    assert "TCP" in only_finding(well(pairs=(measured(1e9),)), Result.WARNING).found


def test_shared_memory_is_not_expected_to_be_as_fast_as_nixl() -> None:
    instances = [instance_of(info_of(name, transport="shm")) for name in ("prefill", "decode")]
    facts = well(*instances, pairs=(pair_of(instances[0], instances[1], 1e9),))
    assert not not_ok(facts)


def test_a_network_is_not_expected_to_be_as_fast_as_one_host() -> None:
    far = [
        instance_of(info_of(name, control_address=f"tcp://10.0.0.{n}:1"), host=f"10.0.0.{n}")
        for n, name in enumerate(("prefill", "decode"))
    ]
    assert not not_ok(well(*far, pairs=(pair_of(far[0], far[1], 1e9),), host=None))
    slow = well(*far, pairs=(pair_of(far[0], far[1], 2e7),), host=None)
    assert "20.0 MB/s" in only_finding(slow, Result.WARNING).found


def test_few_bytes_are_not_judged() -> None:
    pair = PairFacts(
        source_url=PREFILL.url,
        target_url=DECODE.url,
        short=(sample(1000, 0.001),),
        long=(sample(100_000, 0.010),),
    )
    assert not not_ok(well(pairs=(pair,)))


@pytest.mark.parametrize("outcome", ["unreachable", "slow", "declined", "never heard of"])
def test_a_receive_that_failed_is_named_by_its_outcome(outcome: str) -> None:
    pair = PairFacts(source_url=PREFILL.url, target_url=DECODE.url, outcome=outcome)
    assert outcome in only_finding(well(pairs=(pair,)), Result.FAILED).found


def test_an_error_comes_with_its_own_remedy() -> None:
    pair = PairFacts(
        source_url=PREFILL.url, target_url=DECODE.url, error="it burns", remedy="use water"
    )
    finding = only_finding(well(pairs=(pair,)), Result.FAILED)
    assert (finding.found, finding.remedy) == ("it burns", "use water")


def test_directions_left_out_are_told() -> None:
    finding = only_finding(well(num_pairs_left_out=18), Result.WARNING)
    assert "18" in finding.found
    assert "--max-pairs" in finding.remedy


def _untried(*changed: InstanceFacts) -> Finding:
    (finding,) = [
        item for item in findings_of(well(PREFILL, *changed, pairs=())) if item.check == "handoff"
    ]
    assert finding.result is Result.WARNING
    return finding


def test_layouts_or_transports_that_differ_are_why_none_was_tried() -> None:
    layout = msgspec.structs.replace(LAYOUT, kv_dtype="bfloat16")
    other = instance_of(info_of("decode", layout))
    shm = instance_of(info_of("decode", transport="shm"))
    for spoilt, why in ((other, "layouts differ"), (shm, "transports differ")):
        finding = _untried(spoilt)
        assert f"no pair can hand over, because their {why}" in finding.found
        assert "two instances" not in finding.remedy


def test_two_that_cannot_be_reached_are_not_said_to_be_too_few() -> None:
    finding = _untried(replace(DECODE, control=None, http=HttpFacts(error="no connection")))
    assert "two instances" not in finding.remedy
    assert "at least two instances" in _untried().remedy


def test_no_handoff_at_all_is_a_warning_only_where_one_was_wanted() -> None:
    assert only_finding(well(PREFILL), Result.WARNING).check == "handoff"
    assert not not_ok(well(PREFILL, are_transfers_wanted=False))


def test_a_ptrace_scope_matters_only_where_handoffs_are_slow_or_were_not_tried() -> None:
    host = HostFacts(ptrace_scope=1, locked_memory_bytes=None)
    assert not not_ok(well(host=host))
    untried = well(host=host, pairs=(), are_transfers_wanted=False)
    assert only_finding(untried, Result.WARNING).check == "ptrace scope"
    slow = well(host=host, pairs=(pair_of(PREFILL, DECODE, 1e9),))
    assert {item.check for item in not_ok(slow)} == {"handoff", "ptrace scope"}


def test_locked_memory_matters_where_handoffs_fail() -> None:
    host = HostFacts(ptrace_scope=None, locked_memory_bytes=8 * MIB)
    assert not not_ok(well(host=host))
    failed = PairFacts(source_url=PREFILL.url, target_url=DECODE.url, outcome="failed")
    checks = {item.check for item in not_ok(well(host=host, pairs=(failed,)))}
    assert checks == {"handoff", "locked memory"}


def test_the_host_is_left_out_where_no_instance_is_or_nixl_is_not_used() -> None:
    instances = [instance_of(info_of(name, transport="shm")) for name in ("prefill", "decode")]
    for facts in (well(host=None), well(*instances, host=NO_LIMITS)):
        checks = {item.check for item in findings_of(facts)}
        assert checks.isdisjoint({"ptrace scope", "locked memory"})
