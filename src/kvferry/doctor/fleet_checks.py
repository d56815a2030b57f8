"""What is found of the instances together: are they different, of one kind, of one time.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvferry import __version__
from kvferry.doctor.compatibility_checks import compatibility_findings
from kvferry.doctor.control_checks import shared_address
from kvferry.doctor.facts import DeploymentFacts, InstanceFacts, RoutedInstance, RouterFacts
from kvferry.doctor.finding import Check, Finding
from kvferry.protocol.compatibility import REMEDIES
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.signing import SIGNATURE_VALIDITY_S
from kvferry.protocol.version import OLDEST_SUPPORTED_VERSION, PROTOCOL_VERSION, is_supported

MAX_CLOCK_SKEW_S = 10.0
_CLOCK_MARGIN_S = 5.0
_HEALTHY = "healthy"
_SUSPECT = "suspect"
_SAME_KEY_REMEDY = (
    "give the router and that instance the same cluster key, or correct the router's --control"
)
_NOTED_REMEDY = (
    "mend what is said of that instance here; if nothing is, look whether it is overloaded"
)
_ASK_ROUTER_REMEDY = (
    "look whether that instance hangs, and whether the router's --control and cluster key are its"
)


def fleet_findings(facts: DeploymentFacts) -> Iterator[Finding]:
    """Yield the findings that need several instances, or the router's view of them."""
    for router in facts.routers:
        yield from _routed(router)
    known = [instance for instance in facts.instances if instance.info is not None]
    yield from _identities(known)
    yield from _versions(known)
    yield from _layouts(known)
    yield from compatibility_findings(known)
    yield from _transports(known)
    yield from _clocks(facts)


def _routed(router: RouterFacts) -> Iterator[Finding]:
    check = Check("router", router.url)
    unwell = [item for item in router.fleet if item.health != _HEALTHY]
    for item in unwell:
        found = f"it finds {item.role} instance {item.url} {item.health}"
        found += f": {item.detail}" if item.detail else ""
        if item.health == _SUSPECT:
            yield check.warning(found, "look whether that instance is overloaded or restarts")
        else:
            yield check.failed(
                found, "start that instance, or correct its URL in the router's options"
            )
    for role in ("prefill", "decode"):
        if not any(item.role == role for item in router.fleet):
            yield check.failed(f"it has no {role} instance", f"give it one by --{role}")
    nameless = list(_nameless(check, router.fleet))
    yield from nameless
    if not (unwell or nameless) and router.fleet:
        roles = Counter(item.role for item in router.fleet)
        counts = ", ".join(f"{count} {role}" for role, count in roles.items())
        yield check.ok(f"{counts}, all healthy")


def _nameless(check: Check, fleet: Sequence[RoutedInstance]) -> Iterator[Finding]:
    """Yield the healthy instances that do not tell the router who they are, each once."""
    for item in {item.url: item for item in fleet if item.health == _HEALTHY}.values():
        found, remedy = f"it finds {item.url} healthy, but", _ASK_ROUTER_REMEDY
        if item.is_identified:
            if item.detail:
                yield check.warning(f"{found} {item.detail}", _NOTED_REMEDY)
            continue
        if item.is_control_given:
            found += f" got no answer at its control port {item.control_address}"
            remedy = _SAME_KEY_REMEDY
        else:
            found += " did not learn who it is"
        if item.detail:
            yield check.failed(f"{found}: {item.detail}", remedy)
        elif item.is_control_given:
            # Between a probe and its question to the control port the router shows no reason.
            yield check.warning(f"{found} yet", remedy)


def _identities(known: Sequence[InstanceFacts]) -> Iterator[Finding]:
    by_name: dict[str, list[InstanceFacts]] = {}
    for instance in known:
        by_name.setdefault(instance.name, []).append(instance)
    for name, alike in by_name.items():
        epochs = {item.info.epoch for item in alike if item.info is not None}
        urls = ", ".join(item.url for item in alike)
        if len(epochs) > 1:
            yield Check("identity", name).failed(
                f"{urls} are different processes with one instance id",
                "give each instance an id of its own (--instance-id, instance_id in vLLM)",
            )
        elif len(alike) > 1 and not shared_address(alike):
            yield Check("identity", name).warning(
                f"{urls} are the same instance", "give each instance once"
            )


def _versions(known: Sequence[InstanceFacts]) -> Iterator[Finding]:
    spoken = {
        instance.name: instance.control.protocol_version
        for instance in known
        if instance.control is not None and instance.control.protocol_version is not None
    }
    for name, version in spoken.items():
        if not is_supported(version):
            yield Check("protocol", name).failed(
                f"version {version}; here versions {OLDEST_SUPPORTED_VERSION} to "
                f"{PROTOCOL_VERSION + 1} are understood",
                "run kvferry releases that are at most one protocol version apart",
            )
    check = Check("protocol", "all instances")
    if spoken and max(spoken.values()) - min(spoken.values()) > 1:
        yield check.failed(
            f"versions {_listed(spoken)}: more than one apart, so they refuse each other",
            "update the oldest instances",
        )
    elif len(set(spoken.values())) > 1:
        yield check.warning(
            f"versions {_listed(spoken)}: they understand each other, and use what both know",
            "finish the update, so that all instances run one release",
        )
    elif spoken:
        yield check.ok(f"version {next(iter(spoken.values()))}")
    yield from _releases(known)


def _releases(known: Sequence[InstanceFacts]) -> Iterator[Finding]:
    releases = {
        instance.name: instance.info.software_version or "unknown"
        for instance in known
        if instance.info is not None
    }
    if not releases:
        return
    check = Check("kvferry", "all instances")
    distinct = set(releases.values())
    if len(distinct) > 1:
        yield check.warning(
            f"releases {_listed(releases)}", "finish the update, so that all run one release"
        )
    elif distinct == {__version__}:
        yield check.ok(f"release {__version__}, as the doctor's")
    else:
        yield check.warning(
            f"release {next(iter(distinct))}; the doctor's is {__version__}",
            "use the doctor of the instances' own release",
        )


def _listed(values: dict[str, object] | dict[str, int] | dict[str, str]) -> str:
    return ", ".join(f"{value} ({name})" for name, value in values.items())


def reference_layout(known: Sequence[InstanceFacts]) -> KVLayout | None:
    """Return the layout that most instances have, of several the first."""
    layouts = [instance.info.layout for instance in known if instance.info is not None]
    if not layouts:
        return None
    counts = Counter(layout.fingerprint() for layout in layouts)
    return max(layouts, key=lambda layout: counts[layout.fingerprint()])


def _layouts(known: Sequence[InstanceFacts]) -> Iterator[Finding]:
    reference = reference_layout(known)
    if reference is None:
        return
    holders = [item.name for item in known if item.info and item.info.layout == reference]
    all_alike = True
    for instance in known:
        assert instance.info is not None
        layout, check = instance.info.layout, Check("layout", instance.name)
        differing = differing_fields(layout, reference)
        if differing:
            all_alike = False
            yield check.failed(
                "; ".join(
                    f"{name} is {_shown(layout, name)}, {_shown(reference, name)} on {holders[0]}"
                    for name in differing
                ),
                layout_remedy(differing),
            )
        elif layout.fingerprint() != instance.info.fingerprint:
            all_alike = False
            yield check.failed(
                "its fingerprint is not that of the layout it shows",
                "run the same kvferry version on all instances",
            )
    if all_alike:
        yield Check("layout", "all instances").ok(
            f"{short_name(reference.model_name)}, {reference.kv_dtype}, blocks of "
            f"{reference.block_size_tokens} tokens and {reference.block_bytes} bytes, "
            f"{reference.attention_backend}"
        )


def differing_fields(ours: KVLayout, reference: KVLayout) -> list[str]:
    """Return the compared fields in which two layouts differ, in the layout's order."""
    theirs = reference.compared_fields()
    return [name for name, value in ours.compared_fields().items() if value != theirs[name]]


def layout_remedy(differing: Sequence[str]) -> str:
    """Return what makes the instances alike; what follows from another field is left to it."""
    remedies = [REMEDIES[name] for name in differing if name in REMEDIES]
    return "; ".join(remedies) or "serve the same model with the same options on all instances"


def _shown(layout: KVLayout, name: str) -> str:
    value = layout.compared_fields()[name]
    if name in ("weights_digest", "config_digest"):
        return f"{str(value)[:12]}… ({short_name(layout.model_name)})"
    return str(value)


def short_name(model_name: str) -> str:
    """Return a model's name, of a path its last part."""
    is_path = model_name.startswith(("/", "."))
    return model_name.rstrip("/").rpartition("/")[2] if is_path else model_name


def _transports(known: Sequence[InstanceFacts]) -> Iterator[Finding]:
    names = {item.name: item.info.transport for item in known if item.info is not None}
    if not names:
        return
    check, distinct = Check("transport", "all instances"), sorted(set(names.values()))
    if len(distinct) > 1:
        yield check.failed(
            f"{_listed(names)}: they cannot move blocks to each other",
            "start all instances with the same --transport (nixl, where it can be installed)",
        )
        return
    hosts = {instance.host for instance in known}
    if distinct == ["shm"] and len(hosts) > 1:
        yield check.failed(
            f"shm, on {len(hosts)} hosts: shared memory does not leave a host",
            "start all instances with --transport nixl",
        )
        return
    yield check.ok(distinct[0])


def _clocks(facts: DeploymentFacts) -> Iterator[Finding]:
    base_s, base = _base_clock(facts)
    skews = {
        instance.name: instance.http.clock_ahead_s - base_s
        for instance in facts.instances
        if instance.http.clock_ahead_s is not None
    }
    is_fine = True
    for name, skew_s in skews.items():
        check = Check("clock", name)
        found = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} {base}"
        if facts.has_cluster_key and skew_s > SIGNATURE_VALIDITY_S - _CLOCK_MARGIN_S:
            is_fine = False
            yield check.failed(
                f"{found}: a router's signatures have expired when they arrive, so handoffs are "
                "ignored",
                "synchronise the hosts' clocks (NTP)",
            )
        elif abs(skew_s) > MAX_CLOCK_SKEW_S:
            is_fine = False
            yield check.warning(
                f"{found}: leases are durations and do not mind, but signatures and logs do",
                "synchronise the hosts' clocks (NTP)",
            )
    if skews and is_fine:
        yield Check("clock", "all instances").ok(
            f"within {MAX_CLOCK_SKEW_S:.0f} s of {base}; leases are durations and need no clock"
        )


def _base_clock(facts: DeploymentFacts) -> tuple[float, str]:
    """Return the clock that signs: the router's where one was asked, else this host's."""
    for router in facts.routers:
        if router.clock_ahead_s is not None:
            return router.clock_ahead_s, "the router"
    return 0.0, "this host"
