"""What is found of the instances together."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvferry.doctor.deployment_checks import findings_of
from kvferry.doctor.facts import InstanceFacts, RoutedInstance, RouterFacts, short_name
from kvferry.doctor.finding import Result
from kvferry.protocol.ids import PROTOCOL_VERSION
from tests.unit.doctor.deployment_facts import (
    LAYOUT,
    info_of,
    instance_of,
    not_ok,
    only_finding,
    well,
)

PREFILL = instance_of(info_of("prefill"))
DECODE = instance_of(info_of("decode"))


def _with_layout(**changes: object) -> InstanceFacts:
    return instance_of(info_of("decode", msgspec.structs.replace(LAYOUT, **changes)))


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("kv_dtype", "bfloat16", "--dtype"),
        ("weights_digest", "others", "same weights"),
        ("block_size_tokens", 32, "--block-size"),
        ("attention_backend", "other", "backend"),
        ("num_layers", 3, "same model"),
    ],
)
def test_a_differing_field_is_named_with_both_values(
    field: str, value: object, remedy: str
) -> None:
    finding = only_finding(well(PREFILL, _with_layout(**{field: value})), Result.FAILED)
    assert (finding.check, finding.subject) == ("layout", "decode")
    assert f"{field} is {value}" in finding.found
    assert str(getattr(LAYOUT, field)) in finding.found
    assert "on prefill" in finding.found
    assert remedy in finding.remedy


def test_all_differing_fields_are_named() -> None:
    other = _with_layout(kv_dtype="bfloat16", block_bytes=2048, region_strides=(2048,))
    finding = only_finding(well(PREFILL, other), Result.FAILED)
    for name in ("kv_dtype", "block_bytes", "region_strides"):
        assert name in finding.found


def test_the_one_that_differs_from_most_is_blamed() -> None:
    odd = instance_of(info_of("odd", msgspec.structs.replace(LAYOUT, kv_dtype="bfloat16")))
    facts = well(odd, PREFILL, DECODE, pairs=(), are_transfers_wanted=False)
    assert only_finding(facts, Result.FAILED).subject == "odd"


def test_another_model_name_alone_is_no_difference() -> None:
    assert not not_ok(well(PREFILL, _with_layout(model_name="a/local/copy")))


def test_a_fingerprint_of_something_else_has_failed() -> None:
    odd = instance_of(info_of("decode", fingerprint=b"x" * 32))
    assert "fingerprint" in only_finding(well(PREFILL, odd), Result.FAILED).found


def test_two_transports_cannot_meet() -> None:
    other = instance_of(info_of("decode", transport="shm"))
    finding = only_finding(
        well(PREFILL, other, pairs=(), are_transfers_wanted=False), Result.FAILED
    )
    assert "nixl (prefill)" in finding.found
    assert "shm (decode)" in finding.found


def test_shared_memory_does_not_leave_a_host() -> None:
    infos = [
        info_of(name, transport="shm", control_address=f"tcp://10.0.0.{number}:1")
        for number, name in enumerate(("prefill", "decode"))
    ]
    facts = well(*(instance_of(info, host=f"10.0.0.{n}") for n, info in enumerate(infos)))
    assert only_finding(facts, Result.FAILED).check == "transport"


def test_one_id_for_two_processes_has_failed() -> None:
    twin = replace(instance_of(info_of("prefill", epoch=7)), url="http://127.0.0.1:9")
    facts = well(PREFILL, twin)
    assert [(item.check, item.result) for item in not_ok(facts)] == [("identity", Result.FAILED)]


def test_one_instance_by_two_urls_is_a_warning() -> None:
    same = replace(PREFILL, url="http://localhost:1")
    facts = well(PREFILL, same, pairs=(), are_transfers_wanted=False)
    assert only_finding(facts, Result.WARNING).check == "identity"


def _speaking(version: int) -> InstanceFacts:
    assert DECODE.control is not None
    return replace(DECODE, control=replace(DECODE.control, protocol_version=version))


def test_neighbouring_protocol_versions_are_a_warning() -> None:
    finding = only_finding(well(PREFILL, _speaking(PROTOCOL_VERSION - 1)), Result.WARNING)
    assert finding.check == "protocol"


def test_versions_too_far_apart_have_failed() -> None:
    assert PREFILL.control is not None
    newer = replace(
        PREFILL, control=replace(PREFILL.control, protocol_version=PROTOCOL_VERSION + 1)
    )
    facts = well(newer, _speaking(PROTOCOL_VERSION - 1))
    assert only_finding(facts, Result.FAILED).check == "protocol"


@pytest.mark.parametrize("other", ["9.9.9", ""])
def test_other_releases_are_a_warning(other: str) -> None:
    mixed = well(PREFILL, instance_of(info_of("decode", software_version=other)))
    assert (other or "unknown") in only_finding(mixed, Result.WARNING).found
    alike = well(*(instance_of(info_of(n, software_version=other)) for n in ("prefill", "decode")))
    assert (other or "unknown") in only_finding(alike, Result.WARNING).found


def _at_clock(ahead_s: float) -> InstanceFacts:
    return replace(DECODE, http=replace(DECODE.http, clock_ahead_s=ahead_s))


def test_a_clock_that_is_wrong_is_a_warning_without_signatures() -> None:
    for ahead_s in (-100.0, 100.0):
        finding = only_finding(well(PREFILL, _at_clock(ahead_s)), Result.WARNING)
        assert (finding.check, finding.subject) == ("clock", "decode")
        assert "leases are durations" in finding.found


def test_a_clock_ahead_lets_signatures_expire() -> None:
    facts = well(PREFILL, _at_clock(100.0), has_cluster_key=True)
    assert "signatures" in only_finding(facts, Result.FAILED).found
    facts = well(PREFILL, _at_clock(-100.0), has_cluster_key=True)
    assert only_finding(facts, Result.WARNING).check == "clock"


def _router(*fleet: RoutedInstance, clock_ahead_s: float | None = None) -> RouterFacts:
    return RouterFacts(url="http://r:1", clock_ahead_s=clock_ahead_s, fleet=fleet)


def _routed(instance: InstanceFacts, role: str, health: str = "healthy") -> RoutedInstance:
    detail = "" if health == "healthy" else "so it is"
    return RoutedInstance(url=instance.url, role=role, health=health, detail=detail)


def test_clocks_are_compared_with_the_router_that_signs() -> None:
    fleet = (_routed(PREFILL, "prefill"), _routed(DECODE, "decode"))
    router = _router(*fleet, clock_ahead_s=100.0)
    ahead = [
        replace(item, http=replace(item.http, clock_ahead_s=100.0)) for item in (PREFILL, DECODE)
    ]
    assert not not_ok(well(*ahead, routers=(router,), has_cluster_key=True))


@pytest.mark.parametrize(
    ("health", "result"),
    [("down", Result.FAILED), ("unknown", Result.FAILED), ("suspect", Result.WARNING)],
)
def test_what_the_router_does_not_find_healthy_is_named(health: str, result: Result) -> None:
    router = _router(_routed(PREFILL, "prefill"), _routed(DECODE, "decode", health))
    finding = only_finding(well(routers=(router,)), result)
    assert DECODE.url in finding.found
    assert "so it is" in finding.found


def _nameless(detail: str, address: str = "") -> RoutedInstance:
    return replace(
        _routed(DECODE, "decode"),
        detail=detail,
        is_identified=False,
        control_address=address,
        is_control_given=bool(address),
    )


def test_who_does_not_answer_at_the_routers_control_port_has_failed() -> None:
    silent = _nameless("no answer to who it is within 2 s", "tcp://d:7002")
    facts = well(routers=(_router(_routed(PREFILL, "prefill"), silent),))
    finding = only_finding(facts, Result.FAILED)
    assert (finding.check, finding.subject) == ("router", "http://r:1")
    assert f"{DECODE.url} healthy, but got no answer at its control port" in finding.found
    assert finding.found.endswith("tcp://d:7002: no answer to who it is within 2 s")
    assert "same cluster key" in finding.remedy
    assert "the router's --control" in finding.remedy
    assert not any("all healthy" in item.found for item in findings_of(facts))


def test_an_older_routers_reason_is_shown_too() -> None:
    facts = well(routers=(_router(_routed(PREFILL, "prefill"), _nameless("so it is")),))
    assert only_finding(facts, Result.FAILED).found.endswith("did not learn who it is: so it is")


def test_who_has_not_told_the_router_yet_is_a_warning_where_it_was_given_an_address() -> None:
    facts = well(routers=(_router(_routed(PREFILL, "prefill"), _nameless("", "tcp://d:7002")),))
    assert "tcp://d:7002" in only_finding(facts, Result.WARNING).found
    assert not not_ok(well(routers=(_router(_routed(PREFILL, "prefill"), _nameless("")),)))


def test_a_name_that_is_known_and_not_confirmed_is_a_warning() -> None:
    late = replace(_routed(DECODE, "decode"), detail="no answer to who it is within 2 s")
    facts = well(routers=(_router(_routed(PREFILL, "prefill"), late),))
    assert "no answer" in only_finding(facts, Result.WARNING).found


def test_an_instance_in_both_roles_is_named_once() -> None:
    silent = _nameless("so it is", "tcp://d:7002")
    both = _router(replace(silent, role="prefill"), silent)
    assert only_finding(well(routers=(both,)), Result.FAILED).check == "router"


def test_a_router_without_a_role_has_failed() -> None:
    router = _router(_routed(PREFILL, "prefill"))
    failed = [item for item in not_ok(well(routers=(router,))) if item.check == "router"]
    assert ["no decode instance" in item.found for item in failed] == [True]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("/models/tiny/", "tiny"), ("./tiny", "tiny"), ("maker/tiny", "maker/tiny")],
)
def test_of_a_path_the_last_part_names_a_model(name: str, shown: str) -> None:
    assert short_name(name) == shown


def test_the_layout_that_all_have_is_shown() -> None:
    (shown,) = [item.found for item in findings_of(well()) if item.check == "layout"]
    assert all(word in shown for word in ("tiny", "float32", "16 tokens"))
