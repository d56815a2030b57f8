"""What is found of one instance by itself: can it be reached, does it say who it is, has it room.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from kvferry.client.control_answer import ControlAnswer, ControlEnd
from kvferry.doctor.facts import LOOPBACK, InstanceFacts, RoutedInstance, host_of
from kvferry.doctor.finding import Check, Finding
from kvferry.protocol.compatibility import REMEDIES
from kvferry.protocol.messages import InstanceInfo

CAPABILITIES = ("pull", "push", "history")
MIN_FREE_SHARE = 0.1
MAX_QUARANTINED_SHARE = 0.05
_MEANING = {"pull": "handoffs by pull", "push": "handoffs by push", "history": "read-backs"}
_WILDCARDS = frozenset({"0.0.0.0", "::", "*", ""})
_MISMATCH = "mismatch"
_CONTROL_OPTION = "--control"
_KEY_ENDS = (ControlEnd.KEY_REFUSED, ControlEnd.KEY_WANTED)
_ENDS = {
    ControlEnd.ANSWERED: ("answers", ""),
    ControlEnd.NOBODY: (
        "cannot be connected to",
        "start the instance, or correct the address or the firewall: peers need this port as much "
        "as the doctor",
    ),
    ControlEnd.KEY_REFUSED: (
        "does not accept the cluster key",
        "give --cluster-key-file (or KVFERRY_CLUSTER_KEY) the instance's cluster key, or, if it is "
        "another user's without one, a copy of the key that its log names; give --no-user-key if "
        "it has none, or correct the port if it is another program's",
    ),
    ControlEnd.KEY_WANTED: (
        "does not accept a connection without a cluster key",
        "give the instance's cluster key by --cluster-key-file or KVFERRY_CLUSTER_KEY, or, if it "
        "is another user's without one, a copy of the key that its log names, or correct the port "
        "if it is another program's",
    ),
    ControlEnd.SILENT: (
        "accepts a connection and does not answer",
        "look whether the process hangs or is stopped, and whether the port is a kvferry control "
        "port of a version from this one's last",
    ),
    ControlEnd.NOT_UNDERSTOOD: (
        "answers something else than an instance does",
        "correct the port if it is another program's, or run the same kvferry version here and "
        "there",
    ),
    ControlEnd.OTHER_PROGRAM: ("is another program's port, no control port of kvferry's", ""),
    ControlEnd.BAD_ADDRESS: (
        "is no control address",
        "write it as tcp://HOST:PORT, an IPv6 host in brackets",
    ),
}
"""What became of asking a control port, with its address as the subject; and what to do."""


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
            yield _no_control(instance, routed)
        return
    yield _control(instance, instance.control, routed)
    if instance.info is None:
        return
    yield from _advertised(instance, instance.control, instance.info, are_mixed=are_hosts_mixed)
    yield _capabilities(instance.info)
    yield from _receives(instance.info)
    yield from _pool(instance, instance.info)


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
    return check.ok(f"{instance.url} is healthy and {_answers_in(http.round_trip_s)}")


# -- control port -----------------------------------------------------------------------------


def _no_control(instance: InstanceFacts, routed: RoutedInstance | None) -> Finding:
    """Return the finding that no control port is known, and so none was asked."""
    unknown = f"{instance.http.engine or 'the server'} does not say over HTTP who it is, and"
    has_asked = routed is not None and not routed.is_identified and bool(routed.detail)
    if has_asked:
        unknown += " the router got no answer at its control port"
    else:
        unknown += " no control port was given"
    return Check("control port", instance.name).warning(
        f"{unknown}: nothing of its KV can be checked",
        f"add --control {instance.url}=tcp://HOST:PORT with the control_port of its "
        f"kv_connector_extra_config{', so that the doctor finds out why' if has_asked else ''}",
    )


def _control(
    instance: InstanceFacts, control: ControlAnswer, routed: RoutedInstance | None
) -> Finding:
    """Return how asking the instance's control port came out."""
    check, option = Check("control port", instance.name), control_option(instance, routed)
    if control.end is not ControlEnd.ANSWERED or control.info is None:
        how, remedy = _ENDS[control.end]
        if control.end in _KEY_ENDS and instance.http.user_key is not None:
            remedy = instance.http.user_key.remedy
        which = "the control_port of the instance's kv_connector_extra_config, not its HTTP port"
        return check.failed(
            f"{control.address} {how}{f': {control.detail}' if control.detail else ''}",
            remedy or f"correct the port in {option or _CONTROL_OPTION}: it is {which}",
        )
    shown, info = instance.http.info, control.info
    if shown is not None and (shown.instance_id, shown.epoch) != (info.instance_id, info.epoch):
        correct = f"correct {option}" if option else "correct the address that it advertises"
        return check.failed(
            f"{control.address} is answered by {info.instance_id}, another start or "
            f"another instance than the one at {instance.url}",
            f"{correct}, or end the old process",
        )
    return check.ok(f"{control.address} {_answers_in(control.round_trip_s)}")


def control_option(instance: InstanceFacts, routed: RoutedInstance | None) -> str:
    """Return which option has named the control address; empty: the instance itself has."""
    if instance.is_control_given:
        return _CONTROL_OPTION
    is_routers = routed is not None and routed.is_control_given
    return f"the router's {_CONTROL_OPTION}" if is_routers else ""


def _answers_in(round_trip_s: float | None) -> str:
    return "answers" if round_trip_s is None else f"answers in {1e3 * round_trip_s:.1f} ms"


def _advertised(
    instance: InstanceFacts, control: ControlAnswer, info: InstanceInfo, *, are_mixed: bool
) -> Iterator[Finding]:
    """Yield whether other hosts reach the control port at the address that they are told."""
    check, address = Check("advertised address", instance.name), info.control_address
    asked, told = instance.advertised, f"peers are told {address}"
    if urlsplit(address).hostname in _WILDCARDS:
        yield check.failed(
            f"{told}, which names no host",
            "set the instance's advertise host (--advertise-host, advertise_host in vLLM) to a "
            "name or address that peers reach",
        )
    elif host_of(address) == LOOPBACK and (are_mixed or instance.host != LOOPBACK):
        found = f"{told}, which each host takes for itself"
        remedy = (
            "set the control and advertise hosts to an address that the other hosts reach, with a "
            "cluster key"
        )
        if are_mixed:
            yield check.failed(found, remedy)
        else:
            yield check.warning(f"{found}; it serves while all instances are on one host", remedy)
    elif asked is not None and asked.end is not ControlEnd.ANSWERED:
        yield check.failed(
            f"{told}, which {_ENDS[asked.end][0]}",
            "set the advertise host to a name or address that peers reach, and open the port",
        )
    elif asked is not None and asked.info is not None and asked.info.epoch != info.epoch:
        yield check.failed(
            f"{told}, where {asked.info.instance_id} answers, another instance or another start",
            "set the advertise host to an address of the instance itself",
        )
    elif asked is not None or control.end is ControlEnd.ANSWERED:
        yield check.ok(told)  # Else it is the same address, and said already.


# -- what it says of itself -------------------------------------------------------------------


def _capabilities(info: InstanceInfo) -> Finding:
    check = Check("capabilities", info.instance_id)
    missing = [name for name in CAPABILITIES if name not in info.capabilities]
    if missing:
        return check.warning(
            f"without {', '.join(f'{name} ({_MEANING[name]})' for name in missing)}",
            "update kvferry there; until then such requests are served in another way",
        )
    return check.ok(", ".join(info.capabilities))


def _receives(info: InstanceInfo) -> Iterator[Finding]:
    """Yield that an instance was handed other prompts than it was asked, if it was."""
    num_mismatched, num_all = info.receives.get(_MISMATCH, 0), sum(info.receives.values())
    if num_mismatched:
        yield Check("receives", info.instance_id).warning(
            f"{num_mismatched} of {num_all} receives have ended as {_MISMATCH} since its start: "
            "prefill made other tokens of the same request, or had another adapter",
            f"{REMEDIES['tokenizer_digest']}; {REMEDIES['chat_template_digest']}; load the same "
            "adapters everywhere",
        )


def _pool(instance: InstanceFacts, info: InstanceInfo) -> Iterator[Finding]:
    check, load = Check("pool", instance.name), instance.http.load
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
    figures = (
        (load.num_requests_running, "running"),
        (load.num_requests_waiting, "waiting"),
        (load.num_handoffs_held, "handoffs held"),
        (load.num_blocks_leased, "blocks leased"),
        (load.num_blocks_retained, "retained"),
        (load.num_blocks_quarantined, "in quarantine"),
    )
    in_hand = ", ".join(f"{count} {word}" for count, word in figures if count)
    shown = f"{info.num_free_blocks} of {info.num_blocks} blocks free"
    shown += f"; {in_hand}" if in_hand else ""
    if info.num_free_blocks < MIN_FREE_SHARE * info.num_blocks:
        yield check.warning(
            shown, "give the instance more KV memory or less load: requests soon queue for blocks"
        )
    else:
        yield check.ok(shown)
