"""What is found of one instance by itself: can it be reached, does it say who it is, has it room.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from kvferry.doctor.compatibility_checks import receives_finding
from kvferry.doctor.control_checks import answers_in, control_finding, how_it_ended, no_control
from kvferry.doctor.facts import LOOPBACK, ControlEnd, InstanceFacts, RoutedInstance, host_of
from kvferry.doctor.finding import Check, Finding

CAPABILITIES = ("pull", "push", "history")
_MEANING = {"pull": "handoffs by pull", "push": "handoffs by push", "history": "read-backs"}
MIN_FREE_SHARE = 0.1
MAX_QUARANTINED_SHARE = 0.05
_WILDCARDS = frozenset({"0.0.0.0", "::", "*", ""})


def instance_findings(
    instance: InstanceFacts, routed: RoutedInstance | None = None, *, are_hosts_mixed: bool
) -> Iterator[Finding]:
    """Yield the findings of one instance; its URL is the subject while it does not say who it is.

    ``routed`` is what a router shows of it; ``are_hosts_mixed``: the deployment's instances are on
    more than one host.
    """
    yield _http(instance)
    if instance.http.info_error:
        yield Check("identity", instance.name).failed(
            f"GET /kvferry/instance cannot be read: {instance.http.info_error}",
            "run the same kvferry version here and there",
        )
    if instance.control is None:
        if not instance.http.error and not instance.http.info_error:
            yield no_control(instance, routed)
        return
    yield control_finding(instance, instance.control, routed)
    if instance.info is None:
        return
    advertised = _advertised(instance, are_hosts_mixed=are_hosts_mixed)
    if advertised is not None:
        yield advertised
    yield _capabilities(instance)
    yield from receives_finding(instance)
    yield from _pool(instance)


def _http(instance: InstanceFacts) -> Finding:
    check, http = Check("http", instance.name), instance.http
    if http.error:
        return check.failed(http.error, "start the instance, or correct the URL or the firewall")
    if http.health_status != 200:
        said = f"was answered {http.health_status}" if http.health_status else "was not answered"
        return check.failed(
            f"{instance.url}: GET /health {said}", "look into the instance's log, and restart it"
        )
    if http.models_error:
        return check.warning(
            f"{instance.url}: healthy, but GET /v1/models failed: {http.models_error}",
            "give --api-key if the instance asks for one: without the model's name no handoff can "
            "be tried",
        )
    return check.ok(f"{instance.url} is healthy and {answers_in(http.round_trip_s)}")


def _advertised(instance: InstanceFacts, *, are_hosts_mixed: bool) -> Finding | None:
    assert instance.info is not None
    assert instance.control is not None
    check, address = Check("advertised address", instance.name), instance.info.control_address
    if urlsplit(address).hostname in _WILDCARDS:
        return check.failed(
            f"peers are told {address}, which names no host",
            "set the instance's advertise host (--advertise-host, advertise_host in vLLM) to a "
            "name or address that peers reach",
        )
    if host_of(address) == LOOPBACK and (are_hosts_mixed or instance.host != LOOPBACK):
        return _loopback_advertised(check, address, are_hosts_mixed=are_hosts_mixed)
    asked = instance.advertised
    if asked is not None and asked.end is not ControlEnd.ANSWERED:
        return check.failed(
            f"peers are told {address}, which {how_it_ended(asked.end)}",
            "set the advertise host to a name or address that peers reach, and open the port",
        )
    if asked is not None and asked.info is not None and asked.info.epoch != instance.info.epoch:
        return check.failed(
            f"peers are told {address}, where {asked.info.instance_id} answers, another instance "
            "or another start",
            "set the advertise host to an address of the instance itself",
        )
    if asked is None and instance.control.end is not ControlEnd.ANSWERED:
        return None  # The same address, and said already.
    return check.ok(f"peers are told {address}")


def _loopback_advertised(check: Check, address: str, *, are_hosts_mixed: bool) -> Finding:
    found = f"peers are told {address}, which each host takes for itself"
    remedy = (
        "set the control and advertise hosts to an address that the other hosts reach, with a "
        "cluster key"
    )
    if are_hosts_mixed:
        return check.failed(found, remedy)
    return check.warning(f"{found}; it serves while all instances are on one host", remedy)


def _capabilities(instance: InstanceFacts) -> Finding:
    assert instance.info is not None
    check = Check("capabilities", instance.name)
    missing = [name for name in CAPABILITIES if name not in instance.info.capabilities]
    if missing:
        return check.warning(
            f"without {', '.join(f'{name} ({_MEANING[name]})' for name in missing)}",
            "update kvferry there; until then such requests are served in another way",
        )
    return check.ok(", ".join(instance.info.capabilities))


def _pool(instance: InstanceFacts) -> Iterator[Finding]:
    info, load = instance.info, instance.http.load
    assert info is not None
    check = Check("pool", instance.name)
    quarantined = load.num_blocks_quarantined or 0
    if quarantined > MAX_QUARANTINED_SHARE * info.num_blocks:
        yield check.warning(
            f"{quarantined} of {info.num_blocks} blocks are in quarantine: a posted transfer may "
            "still touch them",
            "end or resume the peer that stopped in mid transfer; the blocks return when it is "
            "proven quiet",
        )
    if load.num_peers_resting:
        yield check.warning(
            f"{load.num_peers_resting} peers rest, since they were lost a moment ago: receives "
            "from them are computed instead",
            "look for instances that crash, restart or hang, and for cut links",
        )
    shown = (
        f"{info.num_free_blocks} of {info.num_blocks} blocks free{_in_hand(load_words(instance))}"
    )
    if info.num_free_blocks < MIN_FREE_SHARE * info.num_blocks:
        yield check.warning(
            shown, "give the instance more KV memory or less load: requests soon queue for blocks"
        )
    else:
        yield check.ok(shown)


def load_words(instance: InstanceFacts) -> list[str]:
    """Return what an instance has in hand, in words; what it does not say is left out."""
    load = instance.http.load
    figures = (
        (load.num_requests_running, "running"),
        (load.num_requests_waiting, "waiting"),
        (load.num_handoffs_held, "handoffs held"),
        (load.num_blocks_leased, "blocks leased"),
        (load.num_blocks_retained, "retained"),
        (load.num_blocks_quarantined, "in quarantine"),
    )
    return [f"{count} {word}" for count, word in figures if count]


def _in_hand(words: list[str]) -> str:
    return f"; {', '.join(words)}" if words else ""
