"""What is asked of one URL over HTTP, and how answers become facts.

Knows the JSON of kvferry's instances and routers and the little of vLLM's that is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from kvferry.doctor.facts import HttpFacts, LoadFacts, RoutedInstance, RouterFacts
from kvferry.doctor.http_client import HttpClient, Reply
from kvferry.errors import PeerUnreachableError
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.user_key import UserKeyFile

_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...] = ()


class _Version(msgspec.Struct, frozen=True):
    version: str = ""


class _Exchange(msgspec.Struct, frozen=True):
    num_handoffs_held: int = 0
    num_blocks_leased: int = 0
    num_blocks_quarantined: int = 0
    num_peers_resting: int = 0


class _Retained(msgspec.Struct, frozen=True):
    num_blocks: int = 0


class _Shown(msgspec.Struct, frozen=True):
    """What ``GET /kvferry/instance`` says beside who it is."""

    num_requests_running: int | None = None
    num_requests_waiting: int | None = None
    exchange: _Exchange | None = None
    retained: _Retained | None = None
    user_key: UserKeyFile | None = None


class _Identity(msgspec.Struct, frozen=True):
    control_address: str = ""


class _Routed(msgspec.Struct, frozen=True):
    url: str
    health: str
    detail: str = ""
    is_draining: bool = False
    identity: _Identity | None = None
    control_address: str | None = None


class _Fleet(msgspec.Struct, frozen=True):
    prefill: tuple[_Routed, ...]
    decode: tuple[_Routed, ...]


@dataclass(frozen=True, slots=True)
class HttpQuestions:
    """Asks with a bound of ``timeout_s`` for each question."""

    client: HttpClient
    timeout_s: float

    async def router(self, url: str) -> RouterFacts | None:
        """Return the fleet of the router at ``url``, None if there is no router.

        Raises ``PeerUnreachableError`` if nothing answers.
        """
        reply = await self._get(url, "/kvferry/fleet")
        if reply.status != 200:
            return None
        try:
            fleet = msgspec.json.decode(reply.body, type=_Fleet)
        except msgspec.MsgspecError:
            return None
        routed = [("prefill", item) for item in fleet.prefill]
        routed += [("decode", item) for item in fleet.decode]
        return RouterFacts(
            url=url,
            clock_ahead_s=reply.clock_ahead_s,
            fleet=tuple(_routed(role, item) for role, item in routed),
        )

    async def instance(self, url: str) -> HttpFacts:
        """Return what the instance at ``url`` answers; what it does not is among the facts."""
        try:
            health = await self._get(url, "/health")
            shown = await self._get(url, "/kvferry/instance")
            models = await self._get(url, "/v1/models")
            if shown.status == 200:
                return _of_kvferry(health, shown, models)
            version = await self._get(url, "/version")
            metrics = await self._get(url, "/metrics")
        except PeerUnreachableError as error:
            return HttpFacts(error=str(error))
        return _of_other(health, models, version, metrics)

    async def receives(self, url: str) -> dict[str, float]:
        """Return how many pulls have ended at the instance so far, by outcome.

        Raises ``PeerUnreachableError``.
        """
        reply = await self._get(url, "/metrics")
        return pulls_by_outcome(reply.body.decode(errors="replace"))

    async def _get(self, url: str, path: str) -> Reply:
        return await self.client.get(url + path, self.timeout_s)


def _routed(role: str, item: _Routed) -> RoutedInstance:
    told = item.identity.control_address if item.identity else ""
    return RoutedInstance(
        url=item.url.rstrip("/"),
        role=role,
        health=item.health,
        detail=item.detail,
        is_draining=item.is_draining,
        control_address=item.control_address or told,
        is_control_given=bool(item.control_address),
        is_identified=item.identity is not None,
    )


def _of_kvferry(health: Reply, shown: Reply, models: Reply) -> HttpFacts:
    info, info_error = parse_info(shown.body)
    beside = _parse_shown(shown.body) if info is not None else None
    model, models_error = _model(models)
    return HttpFacts(
        health_status=health.status,
        round_trip_s=health.elapsed_s,
        clock_ahead_s=health.clock_ahead_s,
        engine="kvferry",
        model=model.id,
        max_model_len=model.max_model_len,
        models_error=models_error,
        info=info,
        info_error=info_error,
        user_key=beside.user_key if beside else None,
        load=_shown_load(beside) if beside else LoadFacts(),
    )


def _of_other(health: Reply, models: Reply, version: Reply, metrics: Reply) -> HttpFacts:
    model, models_error = _model(models)
    return HttpFacts(
        health_status=health.status,
        round_trip_s=health.elapsed_s,
        clock_ahead_s=health.clock_ahead_s,
        engine=_engine(version),
        model=model.id,
        max_model_len=model.max_model_len,
        models_error=models_error,
        load=load_of_metrics(metrics.body.decode(errors="replace")),
    )


def parse_info(answer: bytes) -> tuple[InstanceInfo | None, str]:
    """Return who an instance says it is, or None and what is wrong with its answer."""
    try:
        shown = msgspec.json.decode(answer, type=dict[str, object])
        fingerprint = shown.get("fingerprint")
        if isinstance(fingerprint, str):
            shown["fingerprint"] = bytes.fromhex(fingerprint)
        return msgspec.convert({**shown, "type": "instance_info"}, InstanceInfo), ""
    except (msgspec.MsgspecError, ValueError) as error:
        return None, str(error)


def _parse_shown(answer: bytes) -> _Shown | None:
    try:
        return msgspec.json.decode(answer, type=_Shown)
    except msgspec.MsgspecError:
        return None


def _shown_load(shown: _Shown) -> LoadFacts:
    exchange = shown.exchange or _Exchange()
    return LoadFacts(
        num_requests_running=shown.num_requests_running,
        num_requests_waiting=shown.num_requests_waiting,
        num_handoffs_held=exchange.num_handoffs_held,
        num_blocks_leased=exchange.num_blocks_leased,
        num_blocks_quarantined=exchange.num_blocks_quarantined,
        num_blocks_retained=shown.retained.num_blocks if shown.retained else None,
        num_peers_resting=exchange.num_peers_resting,
    )


def load_of_metrics(text: str) -> LoadFacts:
    """Return what vLLM's metrics with the plugin's among them say is in hand."""
    totals: dict[str, int] = {}
    for name, _, value in _METRIC.findall(text):
        totals[name] = totals.get(name, 0) + _count(value)
    return LoadFacts(
        num_requests_running=totals.get("vllm:num_requests_running"),
        num_requests_waiting=totals.get("vllm:num_requests_waiting"),
        num_handoffs_held=totals.get("kvferry_handoffs_held"),
        num_blocks_leased=totals.get("kvferry_leased_blocks"),
        num_blocks_quarantined=totals.get("kvferry_quarantined_blocks"),
        num_blocks_retained=totals.get("kvferry_retained_blocks"),
    )


def pulls_by_outcome(text: str) -> dict[str, float]:
    """Return the plugin's counts of pulls that ended, by outcome, from metrics in text form."""
    counts: dict[str, float] = {}
    for name, labels, value in _METRIC.findall(text):
        outcome = re.search(r'outcome="(\w+)"', labels)
        if name == "kvferry_receives_total" and 'mode="pull"' in labels and outcome:
            counts[outcome[1]] = counts.get(outcome[1], 0) + _count(value)
    return counts


def _count(value: str) -> int:
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        return 0


def _model(reply: Reply) -> tuple[_Model, str]:
    if reply.status != 200:
        return _Model(""), f"answered {reply.status}: {reply.text}"
    try:
        models = msgspec.json.decode(reply.body, type=_Models).data
    except msgspec.MsgspecError as error:
        return _Model(""), str(error)
    return (models[0], "") if models else (_Model(""), "it names no model")


def _engine(version: Reply) -> str:
    if version.status != 200:
        return ""
    try:
        found = msgspec.json.decode(version.body, type=_Version).version
    except msgspec.MsgspecError:
        return ""
    return f"vLLM {found}" if found else ""
