"""What is found of handoffs between pairs, and of this host's limits that they depend on.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from kvferry.doctor.facts import (
    LOOPBACK,
    DeploymentFacts,
    HostFacts,
    InstanceFacts,
    PairFacts,
)
from kvferry.doctor.finding import Check, Finding, Result

MIN_SAME_HOST_BYTES_PER_S = 4e9
"""Below it NIXL goes by TCP: 1 to 2 GB/s on loopback, against 8 to 13 by cross-memory attach."""
MIN_SAME_HOST_TIMED_BYTES_PER_S = 2e9
"""The same by the client's times, which have vLLM's own steps in them: 3 GB/s are usual."""
MIN_NETWORK_BYTES_PER_S = 1e8
MIN_JUDGED_BYTES = 4 * 1024 * 1024
"""Fewer bytes take too little time to tell the bandwidth from the cost of a handoff."""
ENOUGH_LOCKED_BYTES = 1 << 30
CLIENT_NOISE_S = 0.005
"""Two like requests differ by as much: less than that is not seen in the client's times."""
_NIXL = "nixl"
_LOOK = "look into both instances' logs"
_ALLOW_ATTACH = (
    "allow cross-memory attach: ptrace_scope 0 (sysctl kernel.yama.ptrace_scope=0), in containers "
    "CAP_SYS_PTRACE and one process namespace; look for UCX_TLS"
)
_REPEAT = "the host may be busy, so repeat with --repeats 5"
_OUTCOME_REMEDIES = {
    "unreachable": "make the source's advertised control address reachable from the target's host, "
    "with the same cluster key on both",
    "slow": "look at the bandwidth between the hosts, or raise the receive timeout",
    "mismatch": "serve the same model and tokenizer under both URLs",
    "incompatible": "make the instances alike, as the checks layout and compatibility say",
    "gone": "look whether the source restarts, or raise its handoff lease",
    "expired": "raise the source's handoff lease",
    "declined": "give the source more KV memory, or raise its max held share",
}


@dataclass(frozen=True, slots=True)
class Speed:
    """What handoffs of one direction cost. ``is_lower_bound``: it is at least as fast."""

    latency_s: float | None
    """What a handoff costs whatever its size; None: only long ones are moved."""
    bytes_per_s: float
    num_bytes: int
    """Of the long prompt."""
    is_lower_bound: bool
    is_reported: bool


def speed_of(pair: PairFacts) -> Speed | None:
    """Return the speed of one direction, None if nothing was moved.

    The best of each length counts, since other work only adds to a time. What a short prompt
    takes is what any handoff costs, so the bytes beyond it tell the bandwidth.
    """
    if not pair.long:
        return None
    long = min(pair.long, key=lambda sample: sample.moved_s)
    short = min(pair.short, key=lambda sample: sample.moved_s, default=None)
    noise_s = 0.0 if long.is_reported else 2 * CLIENT_NOISE_S
    bytes_per_s, is_lower_bound = long.num_bytes / max(long.moved_s, 1e-6), True
    if short is not None:
        extra_bytes, extra_s = long.num_bytes - short.num_bytes, long.moved_s - short.moved_s
        if extra_bytes > 0 and extra_s > max(noise_s, 0.1 * long.moved_s):
            bytes_per_s, is_lower_bound = extra_bytes / extra_s, False
    latency_s = None if short is None else short.moved_s
    return Speed(latency_s, bytes_per_s, long.num_bytes, is_lower_bound, long.is_reported)


def handoff_findings(facts: DeploymentFacts) -> Iterator[Finding]:
    """Yield the findings of each pair and direction, and of this host."""
    tried = [
        _handoff(facts, pair)
        for pair in facts.pairs
        if not facts.instance(pair.source_url).is_another(pair.answered_by)
    ]
    yield from tried
    if facts.num_pairs_left_out:
        yield Check("handoff", "other pairs").warning(
            f"{facts.num_pairs_left_out} further directions were not tried",
            "raise --max-pairs to try them too",
        )
    if facts.are_transfers_wanted and not facts.pairs:
        yield Check("handoff", "all pairs").warning(*_why_none_was_tried(facts))
    if facts.host is not None and _uses_nixl(facts):
        is_fine = bool(tried) and all(finding.result is Result.OK for finding in tried)
        is_far = len({instance.host for instance in facts.instances}) > 1
        has_failed = any(finding.result is Result.FAILED for finding in tried)
        yield _ptrace(facts.host, is_fine=is_fine)
        yield _locked_memory(facts.host, may_matter=not is_fine and (is_far or has_failed))


def _handoff(facts: DeploymentFacts, pair: PairFacts) -> Finding:
    source, target = facts.instance(pair.source_url), facts.instance(pair.target_url)
    # Of these the control port has told another's name.
    misnamed = facts.others_there()
    names = [item.url if item.url in misnamed else item.name for item in (source, target)]
    check, speed = Check("handoff", " → ".join(names)), speed_of(pair)
    if pair.outcome:
        return check.failed(
            f"the blocks did not come: {pair.outcome}",
            _OUTCOME_REMEDIES.get(pair.outcome, _LOOK),
        )
    if pair.error or speed is None:
        return check.failed(pair.error or "nothing was moved", pair.remedy or _LOOK)
    shown = speed_words(speed)
    if not seems_slow(pair, source, target):
        return check.ok(shown)
    if source.host == target.host:
        is_allowed = facts.host is None or not facts.host.ptrace_scope
        return check.warning(
            f"{shown}: slow for one host, so NIXL may go by TCP",
            f"{_REPEAT}; if it stays slow, {_ALLOW_ATTACH}" if is_allowed else _ALLOW_ATTACH,
        )
    return check.warning(
        f"{shown}: below a gigabit network's speed",
        "look which network device UCX uses (UCX_NET_DEVICES), and at the link itself",
    )


def seems_slow(pair: PairFacts, source: InstanceFacts, target: InstanceFacts) -> bool:
    """Whether the best handoff so far is slower than where the instances are gives reason for."""
    speed = speed_of(pair)
    if speed is None or speed.num_bytes < MIN_JUDGED_BYTES or speed.is_lower_bound:
        return False
    if source.host != target.host:
        return speed.bytes_per_s < MIN_NETWORK_BYTES_PER_S
    if source.info is None or source.info.transport != _NIXL:
        return False
    least = MIN_SAME_HOST_BYTES_PER_S if speed.is_reported else MIN_SAME_HOST_TIMED_BYTES_PER_S
    return speed.bytes_per_s < least


def _why_none_was_tried(facts: DeploymentFacts) -> tuple[str, str]:
    """Return what is found where no pair fits, and what to do."""
    infos = [item.info for item in facts.instances if item.info is not None]
    pairs = [pair for pair in combinations(infos, 2) if pair[0].epoch != pair[1].epoch]
    if pairs and all(
        one.layout.compared_fields() != other.layout.compared_fields() for one, other in pairs
    ):
        return (
            "none was tried: no pair can hand over, because their layouts differ",
            "make the layouts alike as is said above, and ask the doctor again",
        )
    if pairs and all(one.transport != other.transport for one, other in pairs):
        return (
            "none was tried: no pair can hand over, because their transports differ",
            "start all instances with the same transport, and ask the doctor again",
        )
    if len(facts.instances) > 1:
        return (
            "none was tried: no two instances can be reached and fit each other",
            "mend what is said above, and ask the doctor again",
        )
    return (
        "none was tried: it takes two instances that can be reached and fit each other",
        "give at least two instances, and mend what is said above",
    )


def speed_words(speed: Speed) -> str:
    """Return a speed in words: a handoff's own cost, and the bandwidth beyond it."""
    sign = "at least " if speed.is_lower_bound else ""
    way = "" if speed.is_reported else ", by the client's times"
    return (
        f"{_latency(speed)}{sign}{_rate(speed.bytes_per_s)} "
        f"({speed.num_bytes / 1e6:.1f} MB moved{way})"
    )


def _latency(speed: Speed) -> str:
    if speed.latency_s is None:
        return ""
    if not speed.is_reported and speed.latency_s <= CLIENT_NOISE_S:
        return f"under {1e3 * CLIENT_NOISE_S:.0f} ms a handoff, then "
    return f"{1e3 * speed.latency_s:.1f} ms a handoff, then "


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e8:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def _uses_nixl(facts: DeploymentFacts) -> bool:
    here = [item for item in facts.instances if item.host == LOOPBACK] or facts.instances
    return any(item.info is not None and item.info.transport == _NIXL for item in here)


def _ptrace(host: HostFacts, *, is_fine: bool) -> Finding:
    check, scope = Check("ptrace scope", "this host"), host.ptrace_scope
    if not scope:
        shown = "0" if scope == 0 else "no Yama"
        return check.ok(f"{shown}: processes of one user may read each other's memory")
    if is_fine:
        return check.ok(f"{scope}, and the handoffs that were tried are fast all the same")
    return check.warning(
        f"{scope}: processes beside each other may not read each other's memory, so NIXL "
        "goes by TCP",
        "set it to 0 (sysctl kernel.yama.ptrace_scope=0), or give the instances CAP_SYS_PTRACE",
    )


def _locked_memory(host: HostFacts, *, may_matter: bool) -> Finding:
    check, limit = Check("locked memory", "this host"), host.locked_memory_bytes
    if limit is None:
        return check.ok("unlimited in this shell")
    shown = f"at most {limit / 2**20:.0f} MiB in this shell"
    if not may_matter or limit >= ENOUGH_LOCKED_BYTES:
        return check.ok(f"{shown}, which only RDMA minds")
    return check.warning(
        f"{shown}: RDMA has to lock the whole KV memory",
        "raise it where instances use RDMA (ulimit -l unlimited, LimitMEMLOCK, "
        "--ulimit memlock=-1)",
    )
