"""The two legs of a request to vLLM, by hand: what each connector is told. Pure.

A body goes to prefill for one token, then to decode with what prefill offered; or to both at once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from kvferry.errors import MeasurementError
from kvferry.protocol.params import Role
from kvferry.protocol.prefill_report import PrefillReport

Json = dict[str, object]
TRANSFER_FIELD = "kv_transfer_params"
_COORDINATES = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
_ASK_NIXL_PREFILL: Mapping[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmEngine(enum.StrEnum):
    """vLLM by its connector."""

    FERRY = "vllm"
    """FerryConnector."""
    NIXL = "vllm-nixl"
    """vLLM's own NixlConnector: pull."""
    NIXL_PUSH = "vllm-nixl-push"
    """vLLM's own NixlPushConnector."""

    @property
    def modes(self) -> tuple[str, ...]:
        """How KV may be moved."""
        match self:
            case VllmEngine.FERRY:
                return ("pull", "push")
            case VllmEngine.NIXL:
                return ("pull",)
            case VllmEngine.NIXL_PUSH:
                return ("push",)


def prefill_fields(
    engine: VllmEngine,
    transfer_id: str,
    mode: str,
    *,
    history: Mapping[str, object] | None = None,
) -> Json:
    """Return the body fields that make a request a prefill leg.

    ``history`` is, for FerryConnector, the address of who holds the conversation; for
    NixlConnector the handle that came with its answer.
    """
    if engine is VllmEngine.FERRY:
        params: Json = {"transfer_id": transfer_id, "role": Role.PREFILL.value, "mode": mode}
        if history is not None:
            params["history"] = dict(history)
    else:
        params = {**_ASK_NIXL_PREFILL, **(history or {}), "do_remote_decode": True}
    return {"stream": False, "max_tokens": 1, TRANSFER_FIELD: params}


def peer_of(engine: VllmEngine, offered: Mapping[str, object]) -> Json:
    """Return who offers: what a decode leg must know that is sent before prefill has answered.

    Raises ``MeasurementError`` if the offer does not say.
    """
    names = ("peer",) if engine is VllmEngine.FERRY else _COORDINATES
    try:
        found = {name: offered[name] for name in names}
    except KeyError as error:
        raise MeasurementError(f"what prefill offers has no {error}") from error
    if engine is not VllmEngine.FERRY:
        return found
    peer = found["peer"]
    if not isinstance(peer, dict):
        raise MeasurementError("what prefill offers has no peer")
    return peer


def push_params(engine: VllmEngine, transfer_id: str, peer: Mapping[str, object]) -> Json:
    """Return the transfer parameters of a decode leg that is sent together with prefill's."""
    if engine is VllmEngine.FERRY:
        return {
            "transfer_id": transfer_id,
            "role": Role.DECODE.value,
            "mode": "push",
            "peer": dict(peer),
        }
    return {
        **peer,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": transfer_id,
        "remote_block_ids": None,
    }


def offered_by(answer: Mapping[str, object]) -> Json:
    """Return the transfer parameters of a prefill leg's answer. Raises ``MeasurementError``."""
    offered = answer.get(TRANSFER_FIELD)
    if not isinstance(offered, dict):
        raise MeasurementError(f"prefill's answer has no {TRANSFER_FIELD}: is a connector loaded?")
    return offered


def prefill_report_of(offered: object) -> PrefillReport | None:
    """Return what prefill says of its own part, None where the connector says nothing."""
    report = offered.get("prefill_report") if isinstance(offered, dict) else None
    try:
        return None if report is None else msgspec.convert(report, PrefillReport)
    except msgspec.ValidationError as error:
        raise MeasurementError(f"prefill's report is malformed: {error}") from error


def metric_total(text: str, name: str) -> float | None:
    """Return the sum of a metric over its labels in Prometheus' text; None: it is not there."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    ]
    return sum(values) if values else None
