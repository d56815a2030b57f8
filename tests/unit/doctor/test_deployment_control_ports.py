"""What is found of control ports that are others' or that nobody answered for."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvferry.client.control_answer import ControlAnswer, ControlEnd
from kvferry.doctor.facts import (
    DeploymentFacts,
    HttpFacts,
    InstanceFacts,
    PairFacts,
    RoutedInstance,
    RouterFacts,
)
from kvferry.doctor.finding import Finding, Result
from kvferry.protocol.keys import UserKeyFile
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.params import PeerAddress
from tests.unit.doctor.deployment_facts import (
    info_of,
    instance_of,
    not_ok,
    only_finding,
    pair_of,
    well,
)

URL_P, URL_D, URL_X = "http://127.0.0.1:8001", "http://127.0.0.1:8002", "http://127.0.0.1:8003"
P, D, X = (info_of(name) for name in ("prefill", "decode", "further"))


def _vllm(url: str, info: InstanceInfo, *, is_given: bool = True) -> InstanceFacts:
    """What does not say over HTTP who it is, with who answers at its control address."""
    shown = instance_of(info)
    http = replace(shown.http, engine="vLLM 0.32.0", info=None)
    return replace(shown, url=url, http=http, is_control_given=is_given)


def _peer(info: InstanceInfo) -> PeerAddress:
    return PeerAddress(info.instance_id, info.epoch, info.control_address)


def _answered(source: InstanceFacts, target: InstanceFacts, by: InstanceInfo) -> PairFacts:
    return PairFacts(source_url=source.url, target_url=target.url, answered_by=_peer(by))


def _router(*urls: str, is_control_given: bool = True, detail: str = "") -> RouterFacts:
    fleet = tuple(
        RoutedInstance(
            url=url,
            role=role,
            health="healthy",
            detail=detail,
            is_control_given=is_control_given,
            is_identified=not detail,
        )
        for url, role in zip(urls, ("prefill", "decode"), strict=True)
    )
    return RouterFacts(url="http://r:1", clock_ahead_s=None, fleet=fleet)


def _control_findings(facts: DeploymentFacts) -> list[Finding]:
    return [item for item in not_ok(facts) if item.check == "control port"]


def test_swapped_control_ports_have_failed_and_say_who_is_where() -> None:
    at_p, at_d = _vllm(URL_P, D), _vllm(URL_D, P)
    pairs = (_answered(at_p, at_d, P), _answered(at_d, at_p, D))
    findings = not_ok(well(at_p, at_d, pairs=pairs))
    assert [(item.subject, item.result) for item in findings] == [
        (URL_P, Result.FAILED),
        (URL_D, Result.FAILED),
    ]
    first, _ = findings
    assert first.found == (
        f"{URL_P} answers as prefill, but its control address {D.control_address} as decode"
    )
    assert first.remedy == (
        f"correct --control: {P.control_address}, named for {URL_D}, is that of {URL_P}"
    )


def test_a_control_port_of_an_instance_that_was_not_named_has_failed() -> None:
    at_p, at_d = _vllm(URL_P, X), _vllm(URL_D, D)
    pairs = (_answered(at_p, at_d, P), replace(pair_of(at_d, at_p), answered_by=_peer(D)))
    facts = well(at_p, at_d, pairs=pairs)
    finding = only_finding(facts, Result.FAILED)
    assert (finding.check, finding.subject) == ("control port", URL_P)
    assert f"correct --control for {URL_P}" in finding.remedy
    assert P.control_address in finding.remedy


def test_a_handoff_to_a_url_with_anothers_control_port_is_not_called_by_the_others_name() -> None:
    at_p, at_d = _vllm(URL_P, X), _vllm(URL_D, D)
    failed = PairFacts(source_url=URL_D, target_url=URL_P, error="it burns", answered_by=_peer(D))
    facts = well(at_p, at_d, pairs=(_answered(at_p, at_d, P), failed))
    (finding,) = [item for item in not_ok(facts) if item.check == "handoff"]
    assert finding.subject == f"decode → {URL_P}"


def test_another_start_at_the_control_port_has_failed() -> None:
    at_p, at_d = _vllm(URL_P, P), _vllm(URL_D, D)
    later = msgspec.structs.replace(P, epoch=7)
    facts = well(at_p, at_d, pairs=(_answered(at_p, at_d, later),))
    finding = only_finding(facts, Result.FAILED)
    assert "another start of prefill" in finding.found
    assert "old process" in finding.remedy


def test_swapped_ports_of_the_routers_are_said_to_be_the_routers() -> None:
    at_p, at_d = (_vllm(url, i, is_given=False) for url, i in ((URL_P, D), (URL_D, P)))
    pairs = (_answered(at_p, at_d, P), _answered(at_d, at_p, D))
    findings = _control_findings(well(at_p, at_d, pairs=pairs, routers=(_router(URL_P, URL_D),)))
    assert len(findings) == 2
    assert all("the router's --control" in item.remedy for item in findings)


def test_who_answers_as_its_control_port_says_is_well() -> None:
    at_p, at_d = _vllm(URL_P, P), _vllm(URL_D, D)
    pairs = (
        replace(pair_of(at_p, at_d), answered_by=_peer(P)),
        replace(pair_of(at_d, at_p), answered_by=None),
    )
    assert not not_ok(well(at_p, at_d, pairs=pairs))


def test_one_control_address_for_two_urls_has_failed() -> None:
    facts = well(_vllm(URL_P, P), _vllm(URL_D, P), pairs=(), are_transfers_wanted=False)
    finding = only_finding(facts, Result.FAILED)
    assert (finding.check, finding.subject) == ("control port", P.control_address)
    assert f"{URL_P} and {URL_D} were given this one control address" in finding.found
    assert "correct --control" in finding.remedy


def test_one_instance_by_two_addresses_is_the_same_instance() -> None:
    other = msgspec.structs.replace(P)
    one, two = _vllm(URL_P, P), _vllm(URL_D, other)
    assert two.control is not None
    two = replace(two, control=replace(two.control, address="tcp://localhost:7001"))
    facts = well(one, two, pairs=(), are_transfers_wanted=False)
    finding = only_finding(facts, Result.WARNING)
    assert (finding.check, finding.remedy) == ("identity", "give each instance once")


def test_no_control_port_is_not_said_of_one_that_the_router_has_asked() -> None:
    http = HttpFacts(health_status=200, engine="vLLM 0.32.0", model="m")
    asked = InstanceFacts(url=URL_D, http=http)
    router = _router(URL_P, URL_D, is_control_given=False, detail="no answer within 2 s")
    facts = well(_vllm(URL_P, P), asked, pairs=(), are_transfers_wanted=False, routers=(router,))
    (finding,) = _control_findings(facts)
    assert "the router got no answer at its control port" in finding.found
    assert "no control port was given" not in finding.found
    assert f"--control {URL_D}=tcp://" in finding.remedy


def test_another_start_of_kvferrys_own_names_the_option_that_was_given() -> None:
    shown = replace(instance_of(P), is_control_given=True)
    assert shown.control is not None
    other = replace(shown, control=replace(shown.control, info=X))
    finding = only_finding(well(other, instance_of(D)), Result.FAILED)
    assert finding.remedy.startswith("correct --control")


@pytest.mark.parametrize("end", [ControlEnd.KEY_REFUSED, ControlEnd.KEY_WANTED])
def test_of_another_users_instance_the_file_is_named(end: ControlEnd) -> None:
    shown = instance_of(P)
    refused = ControlAnswer(address=P.control_address, end=end)
    (finding,) = _control_findings(well(replace(shown, control=refused), instance_of(D)))
    assert "the key that its log names" in finding.remedy
    http = replace(shown.http, user_key=UserKeyFile("/home/a/user-key", 7, "id"))
    named = replace(shown, http=http, control=refused)
    (finding,) = _control_findings(well(named, instance_of(D)))
    assert "--cluster-key-file /home/a/user-key, the key of uid 7" in finding.remedy
