"""All findings of a deployment, and those that need several instances or the router's view of them.

Are the instances different, of one kind, of one time, and at the addresses that were named? Pure:
facts in, findings out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from kvferry import __version__
from kvferry.doctor.facts import (
    DeploymentFacts,
    InstanceFacts,
    RoutedInstance,
    RouterFacts,
    short_name,
)
from kvferry.doctor.finding import Check, Finding
from kvferry.doctor.handoff_checks import handoff_findings
from kvferry.doctor.instance_checks import control_option, instance_findings
from kvferry.protocol.compatibility import REMEDIES, Compatibility, KVLayout, shown
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.params import PeerAddress
from kvferry.protocol.signing import SIGNATURE_VALIDITY_S

MAX_CLOCK_SKEW_S = 10.0
_CLOCK_MARGIN_S = 5.0
_ALL = "all instances"
_HEALTHY = "healthy"
_SUSPECT = "suspect"
_Told = TypeVar("_Told", KVLayout, Compatibility)
_Known = Sequence[tuple[str, InstanceInfo]]
"""What instances say of themselves, by how findings call them."""


def findings_of(facts: DeploymentFacts) -> list[Finding]:
    """Return what is found of each instance, of all together, and of handoffs between them."""
    are_hosts_mixed = len({instance.host for instance in facts.instances}) > 1
    found: list[Finding] = []
    for instance in facts.instances:
        routed = facts.routed(instance.url)
        found += instance_findings(instance, routed, are_hosts_mixed=are_hosts_mixed)
    found += _shared_addresses(facts)
    found += _exchanged_addresses(facts)
    for router in facts.routers:
        found += _routed(router)
    known = [(item.name, item.info) for item in facts.instances if item.info is not None]
    found += _identities(facts)
    found += _versions(facts)
    found += _releases(known)
    found += _layouts(known)
    found += _compatibility(known)
    found += _transports(facts, known)
    found += _clocks(facts)
    found += handoff_findings(facts)
    return found


# -- who is where -----------------------------------------------------------------------------


def _shared_addresses(facts: DeploymentFacts) -> Iterator[Finding]:
    by_address: dict[str, list[InstanceFacts]] = {}
    for instance in facts.instances:
        if instance.control is not None:
            by_address.setdefault(instance.control.address, []).append(instance)
    for address, alike in by_address.items():
        if not _share_an_address(alike):
            continue
        urls = " and ".join(item.url for item in alike)
        option = control_option(alike[0], facts.routed(alike[0].url)) or "--control"
        yield Check("control port", address).failed(
            f"{urls} were given this one control address, which is only one instance's",
            f"correct {option}: give each URL the control port of its own instance",
        )


def _share_an_address(instances: Sequence[InstanceFacts]) -> bool:
    """Whether one control address was named for all of several URLs.

    URLs of kvferry's own instances say over HTTP who is there, and need none.
    """
    addresses = {item.control.address if item.control else "" for item in instances}
    is_named = all(item.http.info is None for item in instances)
    return is_named and len(instances) > 1 and len(addresses) == 1 and "" not in addresses


def _exchanged_addresses(facts: DeploymentFacts) -> Iterator[Finding]:
    """Yield each URL once where another instance answers than at its control address."""
    for url, peer in facts.others_there().items():
        instance = facts.instance(url)
        if instance.info is None or instance.control is None:
            continue
        theirs: str = instance.info.instance_id
        if theirs == peer.instance_id:
            answered = f"another start of {theirs}"
            remedy = "ask the doctor again if it has just restarted, else end the old process"
        else:
            answered, remedy = theirs, _exchange_remedy(facts, instance, peer)
        yield Check("control port", url).failed(
            f"{url} answers as {peer.instance_id}, but its control address "
            f"{instance.control.address} as {answered}",
            remedy,
        )


def _exchange_remedy(facts: DeploymentFacts, instance: InstanceFacts, peer: PeerAddress) -> str:
    option = control_option(instance, facts.routed(instance.url)) or "--control"
    for other in facts.instances:
        if other.info is not None and other.info.epoch == peer.epoch and other.control is not None:
            return (
                f"correct {option}: {other.control.address}, named for {other.url}, is that of "
                f"{instance.url}"
            )
    return f"correct {option} for {instance.url}: {peer.instance_id} tells {peer.control_address}"


def _identities(facts: DeploymentFacts) -> Iterator[Finding]:
    by_name: dict[str, list[InstanceFacts]] = {}
    for instance in facts.instances:
        if instance.info is not None:
            by_name.setdefault(instance.name, []).append(instance)
    for name, alike in by_name.items():
        epochs = {item.info.epoch for item in alike if item.info is not None}
        urls = ", ".join(item.url for item in alike)
        if len(epochs) > 1:
            yield Check("identity", name).failed(
                f"{urls} are different processes with one instance id",
                "give each instance an id of its own (--instance-id, instance_id in vLLM)",
            )
        elif len(alike) > 1 and not _share_an_address(alike):
            yield Check("identity", name).warning(
                f"{urls} are the same instance", "give each instance once"
            )


# -- a router's view --------------------------------------------------------------------------


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
    roles = Counter(item.role for item in router.fleet)
    for role in ("prefill", "decode"):
        if role not in roles:
            yield check.failed(f"it has no {role} instance", f"give it one by --{role}")
    nameless = list(_nameless(check, router.fleet))
    yield from nameless
    if not (unwell or nameless) and router.fleet:
        counts = ", ".join(f"{count} {role}" for role, count in roles.items())
        yield check.ok(f"{counts}, all healthy")


def _nameless(check: Check, fleet: Sequence[RoutedInstance]) -> Iterator[Finding]:
    """Yield the healthy instances that do not tell the router who they are, each once."""
    for item in {item.url: item for item in fleet if item.health == _HEALTHY}.values():
        found = f"it finds {item.url} healthy, but"
        if item.is_identified:
            if item.detail:
                yield check.warning(
                    f"{found} {item.detail}",
                    "mend what is said of that instance here; if nothing is, look whether it is "
                    "overloaded",
                )
            continue
        if item.is_control_given:
            found += f" got no answer at its control port {item.control_address}"
            remedy = (
                "give the router and that instance the same cluster key, or correct the router's "
                "--control"
            )
        else:
            found += " did not learn who it is"
            remedy = (
                "look whether that instance hangs, and whether the router's --control and cluster "
                "key are its"
            )
        if item.detail:
            yield check.failed(f"{found}: {item.detail}", remedy)
        elif item.is_control_given:
            # Between a probe and its question to the control port the router shows no reason.
            yield check.warning(f"{found} yet", remedy)


# -- releases ---------------------------------------------------------------------------------


def _versions(facts: DeploymentFacts) -> Iterator[Finding]:
    spoken = {
        item.name: item.control.protocol_version
        for item in facts.instances
        if item.control is not None and item.control.protocol_version is not None
    }
    check, listed = Check("protocol", _ALL), f"versions {_listed(spoken)}"
    if spoken and max(spoken.values()) - min(spoken.values()) > 1:
        yield check.failed(
            f"{listed}: more than one apart, so they refuse each other",
            "update the oldest instances",
        )
    elif len(set(spoken.values())) > 1:
        yield check.warning(
            f"{listed}: they understand each other, and use what both know",
            "finish the update, so that all instances run one release",
        )
    elif spoken:
        yield check.ok(f"version {next(iter(spoken.values()))}")


def _releases(known: _Known) -> Iterator[Finding]:
    releases = {name: info.software_version or "unknown" for name, info in known}
    check, distinct = Check("kvferry", _ALL), set(releases.values())
    if len(distinct) > 1:
        yield check.warning(
            f"releases {_listed(releases)}", "finish the update, so that all run one release"
        )
    elif distinct == {__version__}:
        yield check.ok(f"release {__version__}, as the doctor's")
    elif distinct:
        yield check.warning(
            f"release {distinct.pop()}; the doctor's is {__version__}",
            "use the doctor of the instances' own release",
        )


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{value} ({name})" for name, value in values.items())


# -- one kind ---------------------------------------------------------------------------------


def _differences(
    check: str,
    told: Sequence[tuple[str, _Told]],
    key: Callable[[_Told], Hashable],
    show: Callable[[_Told, str], object],
) -> Iterator[Finding]:
    """Yield who differs from what most tell, by ``key``, and from whom; of several the first."""
    counts = Counter(key(each) for _, each in told)
    holder, usual = max(told, key=lambda one: counts[key(one[1])])
    for name, each in told:
        differing = each.differing_fields(usual)
        if differing:
            values = [
                f"{field} is {show(each, field)}, {show(usual, field)} on {holder}"
                for field in differing
            ]
            remedies = dict.fromkeys(REMEDIES[field] for field in differing if field in REMEDIES)
            yield Check(check, name).failed(
                "; ".join(values),
                "; ".join(remedies)
                or "serve the same model with the same options on all instances",
            )


def _layouts(known: _Known) -> Iterator[Finding]:
    if not known:
        return
    layouts = [(name, info.layout) for name, info in known]
    findings = list(_differences("layout", layouts, KVLayout.fingerprint, _shown_of_layout))
    odd = {finding.subject for finding in findings}
    for name, info in known:
        if name not in odd and info.layout.fingerprint() != info.fingerprint:
            findings.append(
                Check("layout", name).failed(
                    "its fingerprint is not that of the layout it shows",
                    "run the same kvferry version on all instances",
                )
            )
    yield from findings
    if not findings:
        reference = layouts[0][1]
        yield Check("layout", _ALL).ok(
            f"{short_name(reference.model_name)}, {reference.kv_dtype}, blocks of "
            f"{reference.block_size_tokens} tokens and {reference.block_bytes} bytes, "
            f"{reference.attention_backend}"
        )


def _shown_of_layout(layout: KVLayout, name: str) -> str:
    value = layout.compared_fields()[name]
    if name in ("weights_digest", "config_digest"):
        return f"{str(value)[:12]}… ({short_name(layout.model_name)})"
    return str(value)


def _compatibility(known: _Known) -> Iterator[Finding]:
    """Yield who differs from most in what peers compare at the handshake, or that nobody does."""
    told = [(name, info.compatibility) for name, info in known if info.compatibility is not None]
    if not told:
        return
    findings = list(_differences("compatibility", told, lambda each: each, _shown_of_compatibility))
    check = Check("compatibility", _ALL)
    lengths = {name: each.max_model_len for name, each in told if each.max_model_len}
    if len(set(lengths.values())) > 1:
        findings.append(
            check.warning(
                f"max_model_len is {_listed(lengths)}: KV is exchanged, and the smaller refuses "
                "what is longer",
                "start all instances with the same --max-model-len",
            )
        )
    (usual, _), *_ = Counter(each for _, each in told).most_common(1)
    yield from findings or [check.ok(_words(usual, len(known) - len(told)))]


def _shown_of_compatibility(each: Compatibility, name: str) -> object:
    return shown(name, getattr(each, name))


def _words(told: Compatibility, num_silent: int) -> str:
    fields = ("tokenizer_digest", "chat_template_digest", "kv_cache_dtype", "max_model_len")
    known = [
        f"{name} {_shown_of_compatibility(told, name)}" for name in fields if getattr(told, name)
    ]
    silent = [f"{num_silent} do not tell theirs"] if num_silent else []
    return ", ".join([*known, *silent]) or "nothing is told"


def _transports(facts: DeploymentFacts, known: _Known) -> Iterator[Finding]:
    names = {name: info.transport for name, info in known}
    check, distinct = Check("transport", _ALL), set(names.values())
    num_hosts = len({item.host for item in facts.instances if item.info is not None})
    if len(distinct) > 1:
        yield check.failed(
            f"{_listed(names)}: they cannot move blocks to each other",
            "start all instances with the same --transport (nixl, where it can be installed)",
        )
    elif distinct == {"shm"} and num_hosts > 1:
        yield check.failed(
            f"shm, on {num_hosts} hosts: shared memory does not leave a host",
            "start all instances with --transport nixl",
        )
    elif distinct:
        yield check.ok(distinct.pop())


# -- one time ---------------------------------------------------------------------------------


def _clocks(facts: DeploymentFacts) -> Iterator[Finding]:
    # The clock that signs counts: the router's where one was asked, else this host's.
    told = (router.clock_ahead_s for router in facts.routers if router.clock_ahead_s is not None)
    base_s = next(told, None)
    base = "this host" if base_s is None else "the router"
    skews = {
        instance.name: instance.http.clock_ahead_s - (base_s or 0.0)
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
        yield Check("clock", _ALL).ok(
            f"within {MAX_CLOCK_SKEW_S:.0f} s of {base}; leases are durations and need no clock"
        )
