"""What is found of control ports: who answers there, and whether that is the URL's instance.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.doctor.facts import (
    ControlEnd,
    ControlFacts,
    DeploymentFacts,
    InstanceFacts,
    RoutedInstance,
)
from kvferry.doctor.finding import Check, Finding
from kvferry.protocol.params import PeerAddress

_CHECK = "control port"
_OPTION = "--control"
_WHICH_PORT = (
    "it is the control_port of the instance's kv_connector_extra_config, not its HTTP port"
)
_REMEDIES = {
    ControlEnd.NOBODY: "start the instance, or correct the address or the firewall: peers need "
    "this port as much as the doctor",
    ControlEnd.KEY_REFUSED: "give --cluster-key-file (or KVFERRY_CLUSTER_KEY) the instance's "
    "cluster key, or, if it is another user's without one, a copy of the key that its log names; "
    "give --no-user-key if it has none, or correct the port if it is another program's",
    ControlEnd.KEY_WANTED: "give the instance's cluster key by --cluster-key-file or "
    "KVFERRY_CLUSTER_KEY, or, if it is another user's without one, a copy of the key that its log "
    "names, or correct the port if it is another program's",
    ControlEnd.SILENT: "look whether the process hangs or is stopped, and whether the port is a "
    "kvferry control port of a version from this one's last",
    ControlEnd.NOT_UNDERSTOOD: "correct the port if it is another program's, or run the same "
    "kvferry version here and there",
    ControlEnd.BAD_ADDRESS: "write it as tcp://HOST:PORT, an IPv6 host in brackets",
}
_KEY_ENDS = (ControlEnd.KEY_REFUSED, ControlEnd.KEY_WANTED)


def no_control(instance: InstanceFacts, routed: RoutedInstance | None) -> Finding:
    """Return the finding that no control port is known, and so none was asked."""
    unknown = f"{instance.http.engine or 'the server'} does not say over HTTP who it is, and"
    has_asked = routed is not None and not routed.is_identified and bool(routed.detail)
    if has_asked:
        unknown += " the router got no answer at its control port"
    else:
        unknown += " no control port was given"
    return Check(_CHECK, instance.name).warning(
        f"{unknown}: nothing of its KV can be checked",
        f"add --control {instance.url}=tcp://HOST:PORT with the control_port of its "
        f"kv_connector_extra_config{', so that the doctor finds out why' if has_asked else ''}",
    )


def control_finding(
    instance: InstanceFacts, control: ControlFacts, routed: RoutedInstance | None
) -> Finding:
    """Return how asking the instance's control port came out."""
    check, option = Check(_CHECK, instance.name), _option(instance, routed)
    if control.end is not ControlEnd.ANSWERED or control.info is None:
        detail = f": {control.detail}" if control.detail else ""
        remedy = _REMEDIES.get(control.end)
        if control.end in _KEY_ENDS and instance.http.user_key is not None:
            remedy = instance.http.user_key.remedy
        return check.failed(
            f"{control.address} {how_it_ended(control.end)}{detail}",
            remedy or f"correct the port in {option or _OPTION}: {_WHICH_PORT}",
        )
    shown = instance.http.info
    if shown is not None and (shown.instance_id, shown.epoch) != (
        control.info.instance_id,
        control.info.epoch,
    ):
        correct = f"correct {option}" if option else "correct the address that it advertises"
        return check.failed(
            f"{control.address} is answered by {control.info.instance_id}, another start or "
            f"another instance than the one at {instance.url}",
            f"{correct}, or end the old process",
        )
    return check.ok(f"{control.address} {answers_in(control.round_trip_s)}")


def answers_in(round_trip_s: float | None) -> str:
    """Return that something answers, and in what time."""
    return "answers" if round_trip_s is None else f"answers in {1e3 * round_trip_s:.1f} ms"


def how_it_ended(end: ControlEnd) -> str:
    """Return what became of asking a control port, with its address as the subject."""
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
            return "answers something else than an instance does"
        case ControlEnd.OTHER_PROGRAM:
            return "is another program's port, no control port of kvferry's"
        case ControlEnd.BAD_ADDRESS:
            return "is no control address"
        case ControlEnd.ANSWERED:
            return "answers"


def _option(instance: InstanceFacts, routed: RoutedInstance | None) -> str:
    """Return which option has named the control address; empty: the instance itself has."""
    if instance.is_control_given:
        return _OPTION
    return f"the router's {_OPTION}" if routed is not None and routed.is_control_given else ""


# -- several instances --------------------------------------------------------------------------


def shared_address(instances: list[InstanceFacts]) -> str:
    """Return the control address that was named for all of several URLs; empty: not so.

    URLs of kvferry's own instances say over HTTP who is there, and need none.
    """
    addresses = {item.control.address if item.control else "" for item in instances}
    is_named = all(item.http.info is None for item in instances)
    return addresses.pop() if is_named and len(instances) > 1 and len(addresses) == 1 else ""


def common_findings(facts: DeploymentFacts) -> Iterator[Finding]:
    """Yield the findings of control addresses that belong to another URL."""
    yield from _shared(facts)
    yield from _exchanged(facts)


def _shared(facts: DeploymentFacts) -> Iterator[Finding]:
    by_address: dict[str, list[InstanceFacts]] = {}
    for instance in facts.instances:
        if instance.control is not None:
            by_address.setdefault(instance.control.address, []).append(instance)
    for address, alike in by_address.items():
        if not shared_address(alike):
            continue
        urls = " and ".join(item.url for item in alike)
        option = _option(alike[0], facts.routed(alike[0].url)) or _OPTION
        yield Check(_CHECK, address).failed(
            f"{urls} were given this one control address, which is only one instance's",
            f"correct {option}: give each URL the control port of its own instance",
        )


def _exchanged(facts: DeploymentFacts) -> Iterator[Finding]:
    """Yield each URL once where another instance answers than at its control address."""
    for url, peer in _others_there(facts).items():
        instance = facts.instance(url)
        if instance.info is None or instance.control is None:
            continue
        yield Check(_CHECK, url).failed(
            f"{url} answers as {peer.instance_id}, but its control address "
            f"{instance.control.address} as {_told_apart(instance.info.instance_id, peer)}",
            _exchange_remedy(facts, instance, peer),
        )


def _told_apart(instance_id: str, peer: PeerAddress) -> str:
    return f"another start of {instance_id}" if instance_id == peer.instance_id else instance_id


def _exchange_remedy(facts: DeploymentFacts, instance: InstanceFacts, peer: PeerAddress) -> str:
    assert instance.info is not None
    if instance.info.instance_id == peer.instance_id:
        return "ask the doctor again if it has just restarted, else end the old process"
    option = _option(instance, facts.routed(instance.url)) or _OPTION
    for other in facts.instances:
        if other.info is not None and other.info.epoch == peer.epoch and other.control is not None:
            return (
                f"correct {option}: {other.control.address}, named for {other.url}, is that of "
                f"{instance.url}"
            )
    return f"correct {option} for {instance.url}: {peer.instance_id} tells {peer.control_address}"


def is_another(instance: InstanceFacts, peer: PeerAddress | None) -> bool:
    """Whether ``peer``, who answered at the instance's URL, is not who its control port says.

    kvferry's own instances say over HTTP who they are, and are compared by that.
    """
    info = instance.info
    if peer is None or info is None or instance.http.info is not None:
        return False
    return (info.instance_id, info.epoch) != (peer.instance_id, peer.epoch)


def misnamed_urls(facts: DeploymentFacts) -> frozenset[str]:
    """Return the URLs whose instance is another than their control port's."""
    return frozenset(_others_there(facts))


def _others_there(facts: DeploymentFacts) -> dict[str, PeerAddress]:
    """Return who answered at each such URL."""
    return {
        pair.source_url: pair.answered_by
        for pair in facts.pairs
        if pair.answered_by is not None
        and is_another(facts.instance(pair.source_url), pair.answered_by)
    }
