"""What is found of one instance by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.client.control_answer import ControlAnswer, ControlEnd
from kvferry.doctor.deployment_checks import findings_of
from kvferry.doctor.facts import HttpFacts, LoadFacts
from kvferry.doctor.finding import Result, worst
from tests.unit.doctor.deployment_facts import (
    info_of,
    instance_of,
    not_ok,
    only_finding,
    well,
    with_http,
)

PREFILL = instance_of(info_of("prefill"))
DECODE = instance_of(info_of("decode"))


def test_a_deployment_that_is_well_has_no_complaint_and_all_checks() -> None:
    findings = findings_of(well())
    assert worst(findings) is Result.OK
    assert not any(finding.remedy for finding in findings)
    assert {finding.check for finding in findings} == {
        "http", "control port", "advertised address", "capabilities", "pool", "protocol", "kvferry",
        "layout", "transport", "clock", "handoff", "ptrace scope", "locked memory",
    }  # fmt: skip


def test_a_url_that_nobody_answers_is_named() -> None:
    dead = replace(DECODE, http=HttpFacts(error="no connection: refused"), control=None)
    finding = only_finding(well(PREFILL, dead, pairs=(), are_transfers_wanted=False), Result.FAILED)
    assert finding.check == "http"
    assert (finding.subject, finding.found) == (dead.url, "no connection: refused")


@pytest.mark.parametrize("status", [0, 503])
def test_an_instance_that_is_not_healthy_has_failed(status: int) -> None:
    ill = with_http(DECODE, replace(DECODE.http, health_status=status))
    finding = only_finding(well(PREFILL, ill), Result.FAILED)
    assert (finding.check, finding.subject) == ("http", "decode")


def test_a_model_that_is_not_told_is_a_warning_naming_the_api_key() -> None:
    closed = with_http(DECODE, replace(DECODE.http, models_error="answered 401"))
    assert "--api-key" in only_finding(well(PREFILL, closed), Result.WARNING).remedy


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (ControlEnd.NOBODY, "cannot be connected to"),
        (ControlEnd.KEY_REFUSED, "cluster key"),
        (ControlEnd.KEY_WANTED, "without a cluster key"),
        (ControlEnd.SILENT, "does not answer"),
        (ControlEnd.NOT_UNDERSTOOD, "something else"),
        (ControlEnd.OTHER_PROGRAM, "another program's"),
        (ControlEnd.BAD_ADDRESS, "no control address"),
    ],
)
def test_a_control_port_that_does_not_answer_says_why(end: ControlEnd, said: str) -> None:
    info = info_of("decode")
    control = ControlAnswer(address=info.control_address, end=end, detail="so it is")
    finding = only_finding(well(PREFILL, instance_of(info, control=control)), Result.FAILED)
    assert finding.check == "control port"
    assert info.control_address in finding.found
    assert said in finding.found
    assert "so it is" in finding.found


def test_a_server_without_a_control_port_is_told_which_option_is_missing() -> None:
    http = HttpFacts(health_status=200, engine="vLLM 0.32.0", model="m")
    other = replace(DECODE, http=http, control=None)
    finding = only_finding(
        well(PREFILL, other, pairs=(), are_transfers_wanted=False), Result.WARNING
    )
    assert "vLLM 0.32.0" in finding.found
    assert f"--control {other.url}=tcp://" in finding.remedy


def test_an_answer_that_cannot_be_read_is_not_taken_for_vllm() -> None:
    newer = HttpFacts(health_status=200, engine="kvferry", model="m", info_error="unknown field")
    other = replace(DECODE, http=newer, control=None)
    finding = only_finding(
        well(PREFILL, other, pairs=(), are_transfers_wanted=False), Result.FAILED
    )
    assert finding.check == "identity"
    assert "unknown field" in finding.found


def test_another_start_behind_the_control_port_is_noticed() -> None:
    later = info_of("decode", epoch=99)
    control = ControlAnswer(address=later.control_address, end=ControlEnd.ANSWERED, info=later)
    finding = only_finding(
        well(PREFILL, instance_of(info_of("decode"), control=control)), Result.FAILED
    )
    assert "another start" in finding.found


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7001", "tcp://[::]:7001"])
def test_a_wildcard_cannot_be_advertised(address: str) -> None:
    facts = well(PREFILL, instance_of(info_of("decode", control_address=address)))
    finding = only_finding(facts, Result.FAILED)
    assert (finding.check, address in finding.found) == ("advertised address", True)


def test_loopback_is_advertised_in_vain_where_instances_are_on_two_hosts() -> None:
    far = instance_of(info_of("decode", control_address="tcp://10.0.0.2:7001"), host="10.0.0.2")
    finding = only_finding(well(PREFILL, far), Result.FAILED)
    assert (finding.check, finding.subject) == ("advertised address", "prefill")


def test_loopback_serves_while_all_are_on_one_other_host() -> None:
    infos = [info_of(name) for name in ("prefill", "decode")]
    facts = well(*(instance_of(info, host="10.0.0.2") for info in infos))
    assert {(item.check, item.result) for item in not_ok(facts)} == {
        ("advertised address", Result.WARNING)
    }


def test_an_advertised_address_that_does_not_answer_has_failed() -> None:
    info = info_of("decode", control_address="tcp://10.9.9.9:7001")
    asked = ControlAnswer(address=info.control_address, end=ControlEnd.NOBODY)
    named = replace(instance_of(info), advertised=asked)
    finding = only_finding(well(PREFILL, named), Result.FAILED)
    assert "10.9.9.9:7001" in finding.found


def test_an_advertised_address_of_somebody_else_has_failed() -> None:
    info, other = info_of("decode"), info_of("other")
    asked = ControlAnswer(address="tcp://h:1", end=ControlEnd.ANSWERED, info=other)
    finding = only_finding(
        well(PREFILL, replace(instance_of(info), advertised=asked)), Result.FAILED
    )
    assert "other answers" in finding.found


def test_missing_capabilities_are_named() -> None:
    older = instance_of(info_of("decode", capabilities=("pull", "push")))
    assert "history" in only_finding(well(PREFILL, older), Result.WARNING).found


@pytest.mark.parametrize(
    ("load", "num_free", "said"),
    [
        (LoadFacts(num_blocks_quarantined=100), 900, "quarantine"),
        (LoadFacts(num_peers_resting=1), 900, "peers rest"),
        (LoadFacts(), 50, "50 of 1000 blocks free"),
    ],
)
def test_pools_that_are_pressed_are_warned_of(load: LoadFacts, num_free: int, said: str) -> None:
    pressed = instance_of(info_of("decode", num_free_blocks=num_free))
    pressed = with_http(pressed, replace(pressed.http, load=load))
    finding = only_finding(well(PREFILL, pressed), Result.WARNING)
    assert finding.check == "pool"
    assert said in finding.found


def test_what_is_in_hand_is_told() -> None:
    busy = with_http(DECODE, replace(DECODE.http, load=LoadFacts(num_requests_running=3)))
    shown = [item.found for item in findings_of(well(PREFILL, busy)) if item.check == "pool"]
    assert shown == ["900 of 1000 blocks free", "900 of 1000 blocks free; 3 running"]
