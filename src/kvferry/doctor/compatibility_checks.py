"""What is found of the instances beyond their layouts: do they make the same prompts and KV.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvferry.doctor.facts import InstanceFacts
from kvferry.doctor.finding import Check, Finding
from kvferry.protocol.compatibility import REMEDIES, Compatibility, shown

_CHECK = "compatibility"
_MISMATCH = "mismatch"


def compatibility_findings(known: Sequence[InstanceFacts]) -> Iterator[Finding]:
    """Yield who differs from most in what peers compare at the handshake, or that nobody does."""
    told = [
        (instance.name, instance.info.compatibility)
        for instance in known
        if instance.info is not None and instance.info.compatibility is not None
    ]
    if not told:
        return
    holder, reference = _most_common(told)
    findings = [
        finding
        for name, compatibility in told
        for finding in _difference(name, compatibility, holder, reference)
    ]
    findings += _lengths(told)
    yield from findings
    if not findings:
        yield Check(_CHECK, "all instances").ok(_words(reference, len(known) - len(told)))


def receives_finding(instance: InstanceFacts) -> Iterator[Finding]:
    """Yield that an instance was handed other prompts than it was asked, if it was."""
    receives = instance.info.receives if instance.info is not None else {}
    num_mismatched, num_all = receives.get(_MISMATCH, 0), sum(receives.values())
    if num_mismatched:
        yield Check("receives", instance.name).warning(
            f"{num_mismatched} of {num_all} receives have ended as {_MISMATCH} since its start: "
            "prefill made other tokens of the same request, or had another adapter",
            f"{REMEDIES['tokenizer_digest']}; {REMEDIES['chat_template_digest']}; load the same "
            "adapters everywhere",
        )


def _most_common(told: Sequence[tuple[str, Compatibility]]) -> tuple[str, Compatibility]:
    counts = Counter(compatibility for _, compatibility in told)
    return max(told, key=lambda one: counts[one[1]])


def _difference(
    name: str, ours: Compatibility, holder: str, reference: Compatibility
) -> Iterator[Finding]:
    differing = ours.differing_fields(reference)
    if differing:
        values = [
            f"{field} is {shown(field, getattr(ours, field))}, "
            f"{shown(field, getattr(reference, field))} on {holder}"
            for field in differing
        ]
        remedies = dict.fromkeys(REMEDIES[field] for field in differing)
        yield Check(_CHECK, name).failed("; ".join(values), "; ".join(remedies))


def _lengths(told: Sequence[tuple[str, Compatibility]]) -> Iterator[Finding]:
    lengths = {name: each.max_model_len for name, each in told if each.max_model_len}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} ({name})" for name, length in lengths.items())
        yield Check(_CHECK, "all instances").warning(
            f"max_model_len is {listed}: KV is exchanged, and the smaller refuses what is longer",
            "start all instances with the same --max-model-len",
        )


def _words(told: Compatibility, num_silent: int) -> str:
    fields = ("tokenizer_digest", "chat_template_digest", "kv_cache_dtype", "max_model_len")
    known = [f"{name} {shown(name, getattr(told, name))}" for name in fields if getattr(told, name)]
    silent = [f"{num_silent} do not tell theirs"] if num_silent else []
    return ", ".join([*known, *silent]) or "nothing is told"
