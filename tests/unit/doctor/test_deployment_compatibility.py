"""What is found of instances beyond their layouts."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.doctor.deployment_checks import findings_of
from kvferry.doctor.examination import fitting_directions
from kvferry.doctor.facts import InstanceFacts
from kvferry.doctor.finding import Result
from kvferry.protocol.compatibility import Compatibility
from tests.unit.doctor.deployment_facts import info_of, instance_of, not_ok, only_finding, well

OURS = Compatibility(
    tokenizer_digest="1" * 32,
    chat_template_digest="2" * 32,
    kv_cache_dtype="bfloat16",
    max_model_len=4096,
)


def saying(name: str, **changes: object) -> InstanceFacts:
    compatibility = msgspec.structs.replace(OURS, **changes)
    return instance_of(info_of(name, compatibility=compatibility))


PREFILL = saying("prefill")


@pytest.mark.parametrize(
    ("field", "value", "shown", "option"),
    [
        ("chat_template_digest", "3" * 32, "3" * 12, "--chat-template"),
        ("tokenizer_digest", "3" * 32, "3" * 12, "--tokenizer"),
        ("kv_cache_dtype", "fp8_e5m2", "fp8_e5m2", "--kv-cache-dtype"),
    ],
)
def test_what_differs_is_named_with_both_values_and_the_option(
    field: str, value: str, shown: str, option: str
) -> None:
    odd = saying("decode", **{field: value})
    finding = only_finding(well(PREFILL, odd, pairs=(), are_transfers_wanted=False), Result.FAILED)
    assert (finding.check, finding.subject) == ("compatibility", "decode")
    assert f"{field} is {shown}" in finding.found
    assert "on prefill" in finding.found
    assert option in finding.remedy
    assert not list(fitting_directions(well(PREFILL, odd)))


def test_the_one_that_differs_from_most_is_blamed() -> None:
    odd = saying("odd", tokenizer_digest="9" * 32)
    facts = well(odd, PREFILL, saying("decode"), pairs=(), are_transfers_wanted=False)
    assert only_finding(facts, Result.FAILED).subject == "odd"


def test_another_longest_sequence_is_a_warning() -> None:
    facts = well(PREFILL, saying("decode", max_model_len=2048))
    finding = only_finding(facts, Result.WARNING)
    for part in ("4096 (prefill)", "2048 (decode)", "exchanged"):
        assert part in finding.found
    assert "--max-model-len" in finding.remedy
    assert len(list(fitting_directions(facts))) == 2


def test_an_earlier_release_does_not_tell_and_is_no_difference() -> None:
    facts = well(PREFILL, instance_of(info_of("decode")))
    assert not not_ok(facts)
    (finding,) = [item for item in findings_of(facts) if item.check == "compatibility"]
    assert "1 do not tell theirs" in finding.found
    assert len(list(fitting_directions(facts))) == 2


def test_prompts_that_differ_are_shown() -> None:
    told = {"received": 38, "mismatch": 2}
    facts = well(instance_of(info_of("prefill")), instance_of(info_of("decode", receives=told)))
    finding = only_finding(facts, Result.WARNING)
    assert (finding.check, finding.subject) == ("receives", "decode")
    assert "2 of 40" in finding.found
    assert "--chat-template" in finding.remedy
