"""What is found of one instance by itself: can it be reached, does it say who it is, has it room.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from kvferry.doctor.facts import LOOPBACK, ControlEnd, ControlFacts, InstanceFacts, host_of
from kvferry.doctor.finding import Check, Finding

CAPABILITIES = ("pull", "push", "history")
_MEANING = {"pull": "handoffs by pull", "push": "handoffs by push", "history": "read-backs"}
MIN_FREE_SHARE = 0.1
MAX_QUARANTINED_SHARE = 0.05
_WILDCARDS = frozenset({"0.0.0.0", "::", "*", ""})
_CONTROL_REMEDIES = {
    ControlEnd.NOBODY: "start the instance, or correct the address or the firewall: peers need "
    "this port as much as the doctor",
    ControlEnd.KEY_REFUSED: "give --cluster-key-file (or KVFERRY_CLUSTER_KEY) the key that the "
    "instance was started with, or leave it out if the instance has none",
    ControlEnd.KEY_WANTED: "give the instance's cluster key by --cluster-key-file or "
    "KVFERRY_CLUSTER_KEY; if it has none, another program listens on that port",
    ControlEnd.SILENT: "look whether the process hangs or is stopped, and whether the port is a "
    "kvferry control port of a version from this one's last",
    ControlEnd.NOT_UNDERSTOOD: "run the same kvferry version here and there",
    ControlEnd.BAD_ADDRESS: "write it as tcp://HOST:PORT, an IPv6 host in brackets",
}


def instance_findings(instance: InstanceFacts, *, are_hosts_mixed: bool) -> Iterator[Finding]:
    """Yield the findings of one instance; its URL is the subject while it does not say who it is.

    ``are_hosts_mixed``: the deployment's instances are on more than one host.
    """
    yield _http(instance)
    if instance.http.info_error:
        yield Check("identity", instance.name).failed(
            f"GET /kvferry/instance cannot be read: {instance.http.info_error}",
            "run the same kvferry version here and there",
        )
    if instance.control is None:
        if not instance.http.error and not instance.http.info_error:
            yield _no_control(instance)
        return
    yield _control(instance, instance.control)
    if instance.info is None:
        return
    advertised = _advertised(instance, are_hosts_mixed=are_hosts_mixed)
    if advertised is not None:
        yield advertised
    yield _capabilities(instance)
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
    return check.ok(f"{instance.url} is healthy and {_answers(http.round_trip_s)}")


def _answers(round_trip_s: float | None) -> str:
    return "answers" if round_trip_s is None else f"answers in {1e3 * round_trip_s:.1f} ms"


def _no_control(instance: InstanceFacts) -> Finding:
    return Check("control port", instance.name).warning(
        f"{instance.http.engine or 'the server'} does not say over HTTP who it is, and no control "
        "port was given: nothing of its KV can be checked",
        f"add --control {instance.url}=tcp://HOST:PORT with the control_port of its "
        "kv_connector_extra_config",
    )


def _control(instance: InstanceFacts, control: ControlFacts) -> Finding:
    check = Check("control port", instance.name)
    if control.end is not ControlEnd.ANSWERED or control.info is None:
        detail = f": {control.detail}" if control.detail else ""
        return check.failed(
            f"{control.address} {_how_it_ended(control.end)}{detail}",
            _CONTROL_REMEDIES.get(control.end, ""),
        )
    shown = instance.http.info
    if shown is not None and (shown.instance_id, shown.epoch) != (
        control.info.instance_id,
        control.info.epoch,
    ):
        return check.failed(
            f"{control.address} is answered by {control.info.instance_id}, another start or "
            f"another instance than the one at {instance.url}",
            "end the old process, or correct the address that the instance advertises",
        )
    return check.ok(f"{control.address} {_answers(control.round_trip_s)}")


def _how_it_ended(end: ControlEnd) -> str:
    match end:
        case ControlEnd.NOBODY:
            return "cannot be connected to"
        case ControlEnd.KEY_REFUSED:
            return "does not accept the cluster key"
        case ControlEnd.KEY_WANTED:
            return "does not accept a connection without a cluster key"
        case ControlEnd.SILENT:
            return "accepts a connection and does not answer"
        case ControlEnd.NOT_UNDERSTOOD:
            return "answers something else"
        case ControlEnd.BAD_ADDRESS:
            return "is no control address"
        case ControlEnd.ANSWERED:
            return "answers"


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
            f"peers are told {address}, which {_how_it_ended(asked.end)}",
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
