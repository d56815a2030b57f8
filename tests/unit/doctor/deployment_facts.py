"""A deployment in which all is well, for tests to spoil."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvferry import __version__
from kvferry.doctor.facts import (
    ControlEnd,
    ControlFacts,
    DeploymentFacts,
    HandoffSample,
    HostFacts,
    HttpFacts,
    InstanceFacts,
    PairFacts,
)
from kvferry.doctor.finding import Finding, Result
from kvferry.doctor.findings import findings_of
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.version import PROTOCOL_VERSION

LAYOUT = KVLayout(
    model_name="tiny",
    weights_digest="weights",
    config_digest="config",
    kv_dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_size=8,
    block_size_tokens=16,
    block_bytes=4096,
    attention_backend="test",
    region_strides=(4096,),
)
MIB = 1024 * 1024


def info_of(name: str, layout: KVLayout = LAYOUT, **changes: object) -> InstanceInfo:
    number = sum(name.encode())
    info = InstanceInfo(
        instance_id=InstanceId(name),
        epoch=Epoch(number),
        control_address=f"tcp://127.0.0.1:{number}",
        fingerprint=layout.fingerprint(),
        layout=layout,
        transport="nixl",
        capabilities=("pull", "push", "history"),
        num_blocks=1000,
        num_free_blocks=900,
        software_version=__version__,
    )
    return msgspec.structs.replace(info, **changes)


def instance_of(
    info: InstanceInfo, host: str = "127.0.0.1", control: ControlFacts | None = None
) -> InstanceFacts:
    """Return what an instance of kvferry's own that is well answers."""
    answered = ControlFacts(
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
