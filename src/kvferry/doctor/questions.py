"""What is asked of one URL or control port, and how answers become facts.

Knows the JSON of kvferry's instances and routers and the little of vLLM's that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from kvferry.client.control_answer import ControlAnswer
from kvferry.client.control_port import ControlPorts
from kvferry.client.http_client import HttpClient, Reply
from kvferry.client.metrics_text import metric_by_label, metric_total
from kvferry.doctor.facts import HttpFacts, LoadFacts, RoutedInstance, RouterFacts
from kvferry.errors import PeerUnreachableError
from kvferry.protocol.keys import UserKeyFile
from kvferry.protocol.messages import InstanceInfo

_Decoded = TypeVar("_Decoded")
_LOAD_METRICS: Mapping[str, str] = {
    "num_requests_running": "vllm:num_requests_running",
    "num_requests_waiting": "vllm:num_requests_waiting",
    "num_handoffs_held": "kvferry_handoffs_held",
    "num_blocks_leased": "kvferry_leased_blocks",
    "num_blocks_quarantined": "kvferry_quarantined_blocks",
    "num_blocks_retained": "kvferry_retained_blocks",
}


class _Identity(msgspec.Struct, frozen=True):
    control_address: str = ""


class _Routed(msgspec.Struct, frozen=True):
    url: str
    health: str
    detail: str = ""
    is_draining: bool = False
    identity: _Identity | None = None
    control_address: str | None = None

    def facts(self, role: str) -> RoutedInstance:
        told = self.identity.control_address if self.identity else ""
        return RoutedInstance(
            url=self.url.rstrip("/"),
            role=role,
            health=self.health,
            detail=self.detail,
            is_draining=self.is_draining,
            control_address=self.control_address or told,
            is_control_given=bool(self.control_address),
            is_identified=self.identity is not None,
        )


class _Fleet(msgspec.Struct, frozen=True):
    prefill: tuple[_Routed, ...]
    decode: tuple[_Routed, ...]


class _Model(msgspec.Struct, frozen=True):
    id: str = ""
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


@dataclass(frozen=True, slots=True)
class Questions:
    """Asks over HTTP, and at control ports."""

    http: HttpClient
    ports: ControlPorts

    async def control(self, address: str) -> ControlAnswer:
        """Return who answers at a control port, or why nobody does."""
        return await self.ports.find_out(address, self.http.timeout_s)

    async def router(self, url: str) -> RouterFacts | None:
        """Return the fleet of the router at ``url``, None if no router answers there."""
        try:
            reply = await self.http.ask(f"{url}/kvferry/fleet")
        except PeerUnreachableError:
            return None  # Said when it is asked as an instance.
        fleet = _decoded(reply, _Fleet)
        if fleet is None:
            return None
        routed = [item.facts("prefill") for item in fleet.prefill]
        routed += [item.facts("decode") for item in fleet.decode]
        return RouterFacts(url=url, clock_ahead_s=reply.clock_ahead_s, fleet=tuple(routed))

    async def instance(self, url: str) -> HttpFacts:
        """Return what the instance at ``url`` answers; what it does not is among the facts."""
        try:
            health = await self.http.ask(f"{url}/health")
            shown = await self.http.ask(f"{url}/kvferry/instance")
            model, models_error = _model(await self.http.ask(f"{url}/v1/models"))
            told = HttpFacts(
                health_status=health.status,
                round_trip_s=health.elapsed_s,
                clock_ahead_s=health.clock_ahead_s,
                model=model.id,
                max_model_len=model.max_model_len,
                models_error=models_error,
            )
            if shown.status == 200:
                return _of_kvferry(told, shown)
            version = _decoded(await self.http.ask(f"{url}/version"), _Version)
            engine = f"vLLM {version.version}" if version and version.version else ""
            return replace(told, engine=engine, load=load_of_metrics(await self._metrics(url)))
        except PeerUnreachableError as error:
            return HttpFacts(error=str(error))

    async def pulls(self, url: str) -> dict[str, float]:
        """Return how many pulls have ended at the instance so far, by outcome, as it counts them.

        Raises ``PeerUnreachableError``.
        """
        return pulls_by_outcome(await self._metrics(url))

    async def _metrics(self, url: str) -> str:
        return (await self.http.ask(f"{url}/metrics")).body.decode(errors="replace")


def _decoded(reply: Reply, kind: type[_Decoded]) -> _Decoded | None:
    """Return an answer as ``kind``, None where it is an error or cannot be read as that."""
    try:
        return msgspec.json.decode(reply.body, type=kind) if reply.status == 200 else None
    except msgspec.MsgspecError:
        return None


def _model(reply: Reply) -> tuple[_Model, str]:
    """Return the model that is served first, or why it is not known."""
    if reply.status != 200:
        return _Model(), f"answered {reply.status}: {reply.text}"
    try:
        models = msgspec.json.decode(reply.body, type=_Models).data
    except msgspec.MsgspecError as error:
        return _Model(), str(error)
    return (models[0], "") if models else (_Model(), "it names no model")


def _of_kvferry(told: HttpFacts, answer: Reply) -> HttpFacts:
    """Return what was told, with what kvferry's own engine shows of itself."""
    info, info_error = parse_info(answer.body)
    told = replace(told, engine="kvferry", info=info, info_error=info_error)
    shown = _decoded(answer, _Shown)
    if info is None or shown is None:
        return told
    load = LoadFacts(
        num_requests_running=shown.num_requests_running,
        num_requests_waiting=shown.num_requests_waiting,
        num_blocks_retained=shown.retained.num_blocks if shown.retained else None,
        **msgspec.structs.asdict(shown.exchange or _Exchange()),
    )
    return replace(told, user_key=shown.user_key, load=load)


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


def load_of_metrics(text: str) -> LoadFacts:
    """Return what vLLM's metrics with the plugin's among them say is in hand."""
    totals = {name: metric_total(text, metric) for name, metric in _LOAD_METRICS.items()}
    known = {name: total for name, total in totals.items() if total is not None}
    return LoadFacts(**{name: int(each) for name, each in known.items() if math.isfinite(each)})


def pulls_by_outcome(text: str) -> dict[str, float]:
    """Return the plugin's counts of pulls that ended, by outcome, from metrics in text form."""
    return metric_by_label(text, "kvferry_receives_total", "outcome", mode="pull")
