"""A deployment in which all is well, for tests to spoil."""

from __future__ import annotations

from dataclasses import replace

from kvferry.client.control_answer import ControlAnswer, ControlEnd
from kvferry.doctor.deployment_checks import findings_of
from kvferry.doctor.facts import (
    DeploymentFacts,
    HandoffSample,
    HostFacts,
    HttpFacts,
    InstanceFacts,
    PairFacts,
)
from kvferry.doctor.finding import Finding, Result
from kvferry.protocol.ids import PROTOCOL_VERSION
from kvferry.protocol.messages import InstanceInfo
from tests.unit.client.instance_info import LAYOUT as LAYOUT
from tests.unit.client.instance_info import info_of as info_of

MIB = 1024 * 1024


def instance_of(
    info: InstanceInfo, host: str = "127.0.0.1", control: ControlAnswer | None = None
) -> InstanceFacts:
    """Return what an instance of kvferry's own that is well answers."""
    answered = ControlAnswer(
        address=info.control_address,
        end=ControlEnd.ANSWERED,
        round_trip_s=0.001,
        protocol_version=PROTOCOL_VERSION,
        info=info,
    )
    return InstanceFacts(
        url=f"http://{host}:{8000 + info.epoch % 1000}",
        http=HttpFacts(
            health_status=200,
            round_trip_s=0.002,
            clock_ahead_s=0.3,
            engine="kvferry",
            model="tiny",
            max_model_len=4096,
            info=info,
        ),
        control=control or answered,
    )


def with_http(instance: InstanceFacts, http: HttpFacts) -> InstanceFacts:
    return replace(instance, http=http)


def sample(num_bytes: int, moved_s: float, *, is_reported: bool = True) -> HandoffSample:
    return HandoffSample(
        num_tokens=num_bytes // 256, num_bytes=num_bytes, moved_s=moved_s, is_reported=is_reported
    )


def pair_of(source: InstanceFacts, target: InstanceFacts, bytes_per_s: float = 8e9) -> PairFacts:
    """Handoffs at that speed, beyond 2 ms that each of them costs."""
    return PairFacts(
        source_url=source.url,
        target_url=target.url,
        short=(sample(MIB, 0.002 + MIB / bytes_per_s),),
        long=(sample(33 * MIB, 0.002 + 33 * MIB / bytes_per_s),),
    )


def well(*instances: InstanceFacts, **changes: object) -> DeploymentFacts:
    """Return a deployment of those instances, or of two that are well."""
    asked = instances or (instance_of(info_of("prefill")), instance_of(info_of("decode")))
    first, second = asked[0], asked[-1]
    pairs = (pair_of(first, second), pair_of(second, first)) if first is not second else ()
    facts = DeploymentFacts(
        instances=asked,
        pairs=pairs,
        host=HostFacts(ptrace_scope=0, locked_memory_bytes=None),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def not_ok(facts: DeploymentFacts) -> list[Finding]:
    return [item for item in findings_of(facts) if item.result is not Result.OK]


def only_finding(facts: DeploymentFacts, result: Result) -> Finding:
    """Return the one finding that is not ok; it must have that result and a remedy."""
    (finding,) = not_ok(facts)
    assert finding.result is result, finding
    assert finding.remedy
    return finding
