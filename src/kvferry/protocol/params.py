"""``kv_transfer_params``: what travels in HTTP bodies between the router and engines.

At the edge it is a JSON object, as in vLLM; inside it is typed. Unknown keys are refused where a
user may have written them (a misspelt key that is silently ignored switches reuse off). They are
ignored where a newer router or instance must have: in nested objects, which no user makes, and in a
body that is signed. The router relays them.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.errors import RequestError
from kvferry.protocol.ids import (
    MAX_TRANSFER_ID_CHARS,
    TRANSFER_ID_PATTERN,
    Epoch,
    InstanceId,
    TransferId,
)
from kvferry.protocol.messages import MAX_DURATION_S, MAX_NAME_CHARS
from kvferry.protocol.prefill_result import FirstToken as FirstToken
from kvferry.protocol.prefill_result import PrefillReport as PrefillReport
from kvferry.protocol.prefill_result import TokenLogprob as TokenLogprob

TRANSFER_FIELD = "kv_transfer_params"
"""Holds the parameters, in the body of a leg and in prefill's answer."""
PROGRESS_FIELD = "kv_progress"
"""Asks a prefill leg to tell how far it is, and holds that in its stream."""
REPORT_FIELD = "kv_report"
"""Asks for times and counts of one request, and holds them in its answer."""

_Count = Annotated[int, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(ge=0, le=MAX_DURATION_S)]
MAX_PORT = 65_535
_MISSPELLING_RATIO = 0.8
_MAX_PORT_DIGITS = 5


class Role(enum.StrEnum):
    """The part that an instance takes in one request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Mode(enum.StrEnum):
    """How the KV of a handoff moves."""

    PULL = "pull"
    """Decode READs what prefill holds."""
    PUSH = "push"
    """Prefill WRITEs into blocks that decode registers, while it still computes."""


class OnFailure(enum.StrEnum):
    """What a decode leg does when the KV does not come and no token has been answered yet."""

    RECOMPUTE = "recompute"
    """Compute the prompt here."""
    ERROR = "error"
    """End with an error, so that the router can try elsewhere."""


def is_port(text: str) -> bool:
    """Return whether ``text`` is the number of a TCP port, 0 excluded."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_PORT_DIGITS
    return is_number and 0 < int(text) <= MAX_PORT


class PeerAddress(msgspec.Struct, frozen=True):
    """Where the other side of a handoff is, and which start of it. Unknown fields are allowed: it
    comes from an instance, which may be a newer one."""

    instance_id: Annotated[InstanceId, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    epoch: Annotated[Epoch, Meta(ge=0, le=2**62)]
    control_address: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    """ZeroMQ endpoint, ``tcp://host:port``; IPv6 hosts in brackets. With tensor parallelism that of
    rank 0."""

    def of_rank(self, rank: int) -> PeerAddress:
        """Return where the worker of that tensor-parallel rank is: its port is ``rank`` higher.

        An address without a number for a port is returned as it is, for its reader to refuse.
        """
        host, _, port = self.control_address.rpartition(":")
        if not (rank and is_port(port)):
            return self
        moved = f"{host}:{int(port) + rank}"
        return PeerAddress(self.instance_id, self.epoch, moved)


class KvTransferParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One leg's parameters. ``peer`` and ``first_token`` are set on the decode leg.

    ``lease_s`` is a duration: how long prefill holds the blocks from when it answered.
    ``prefill_end_s`` is the host's monotonic clock at the end of prefill's last forward, for
    measurements on one host; nothing is decided by it. ``on_failure`` is the decode leg's.
    ``history`` is the prefill leg's: an instance that probably holds blocks of the prompt.
    ``retention_s`` is the decode leg's: how long to retain prompt and answer for a later turn; None
    is the instance's own default, 0 ends the conversation and what is retained of it.
    """

    transfer_id: TransferId
    role: Role
    mode: Mode = Mode.PULL
    peer: PeerAddress | None = None
    first_token: FirstToken | None = None
    num_prompt_tokens: _Count | None = None
    lease_s: _Seconds | None = None
    prefill_end_s: float | None = None
    prefill_report: PrefillReport | None = None
    on_failure: OnFailure = OnFailure.RECOMPUTE
    history: PeerAddress | None = None
    retention_s: _Seconds | None = None


def parse_params(value: object, *, from_peer: bool = False) -> KvTransferParams:
    """Check and convert the JSON object ``value``.

    ``from_peer``: it is proven that who wrote it has the key. Unknown keys are then taken for those
    of a newer router and ignored, but for near misspellings, since who signs by hand has it, too.
    Raises ``RequestError`` naming what is wrong.
    """
    if from_peer and isinstance(value, dict):
        known = KvTransferParams.__struct_fields__
        for name in value.keys() - known:
            _refuse_misspelling(name, known)
        value = {name: field for name, field in value.items() if name in known}
    try:
        params = msgspec.convert(value, KvTransferParams)
    except (msgspec.ValidationError, UnicodeError) as error:  # UnicodeError: a lone surrogate
        raise RequestError(
            f"kv_transfer_params: {error}", param="kv_transfer_params", code="invalid_value"
        ) from error
    if len(params.transfer_id) > MAX_TRANSFER_ID_CHARS or not re.match(
        TRANSFER_ID_PATTERN, params.transfer_id
    ):
        raise RequestError(
            f"kv_transfer_params.transfer_id must have 1 to {MAX_TRANSFER_ID_CHARS} visible "
            "ASCII characters other than a comma",
            param="kv_transfer_params.transfer_id",
            code="invalid_value",
        )
    if params.role is Role.DECODE and params.peer is None:
        raise RequestError(
            "kv_transfer_params.peer is required when role is 'decode'",
            param="kv_transfer_params.peer",
            code="missing_required_parameter",
        )
    return params


def _refuse_misspelling(name: object, known: Sequence[str]) -> None:
    for nearest in difflib.get_close_matches(str(name), known, n=1, cutoff=_MISSPELLING_RATIO):
        raise RequestError(
            f"kv_transfer_params: unknown key {name!r}; the nearest is {nearest!r}",
            param="kv_transfer_params",
            code="invalid_value",
        )


def emit_params(params: KvTransferParams) -> dict[str, Any]:
    """Return the JSON object for ``params``."""
    result: dict[str, Any] = msgspec.to_builtins(params)
    return result
