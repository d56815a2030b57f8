"""``InstanceService``: what the HTTP handlers share, and where each part of an instance is reached.

Owns the live transfers, the tokenising thread and the decision whether a request's transfer
parameters are trusted. Knows no routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvferry.clock import Clock
from kvferry.connector.ports import ConnectorSnapshot
from kvferry.engine.request import EngineRequest
from kvferry.engine.tokenizer import Tokenizer
from kvferry.errors import RemoteProtocolError, RequestError
from kvferry.observe.log import get_logger
from kvferry.observe.metrics import Metrics
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.params import KvTransferParams, parse_params
from kvferry.protocol.signing import SIGNATURE_HEADER, verify
from kvferry.protocol.user_key import UserKeyFile
from kvferry.server.config import HttpConfig
from kvferry.server.errors import ShuttingDownError
from kvferry.server.generation import EngineLike, Generation, OutputBridge
from kvferry.server.metering import PreemptionMeter, RetainedMeter
from kvferry.server.read_backs import ReadBackTotals
from kvferry.server.retained import RetainedFigures

_log = get_logger(__name__)

Result = TypeVar("Result")


class EngineFigures(Protocol):
    """What the server shows of an engine's state."""

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission or for blocks."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the engine can still serve."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Times that a request gave up its blocks, since the start."""
        ...

    @property
    def num_blind_links(self) -> int:
        """Peers that may write here and whose death could not be proven."""
        ...

    @property
    def retained(self) -> RetainedFigures:
        """What is kept for conversations' later turns."""
        ...


class TransferEnds(Protocol):
    """What the server uses of a ``ConnectorPort``."""

    def withdraw(self, transfer_id: TransferId) -> None:
        """Give up an offer or a send."""
        ...

    def end_receive(self, transfer_id: TransferId, *, needed: bool) -> None:
        """Give up a receive."""
        ...

    def snapshot(self) -> ConnectorSnapshot:
        """Return counts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients see it; the first name is the one that answers carry."""

    names: tuple[str, ...]
    max_model_len: int
    """Most tokens of prompt and answer."""
    vocab_size: int
    created_s: int
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """What a service is made of. ``connector`` is None for an instance that exchanges nothing."""

    engine: EngineLike
    figures: Callable[[], EngineFigures]
    tokenizer: Tokenizer
    connector: TransferEnds | None
    describe: Callable[[], InstanceInfo]
    model: ServedModel
    metrics: Metrics
    clock: Clock
    wall_time_s: Callable[[], float]
    """Unix time, for ``created`` and for the expiry of signatures."""
    http: HttpConfig
    cluster_key: bytes | None = None
    user_key_file: UserKeyFile | None = None
    """Where ``cluster_key`` is from, if it is a user's own; shown to whoever asks."""


class InstanceService:
    """One instance's services to its handlers; all on one event loop."""

    def __init__(self, parts: ServiceParts, loop: asyncio.AbstractEventLoop) -> None:
        self.parts = parts
        self._loop = loop
        self._bridge = OutputBridge(loop)
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._live_transfers: dict[TransferId, RequestId] = {}
        self._is_shutting_down = False
        self.retained_meter = RetainedMeter(parts.metrics.engine)
        self.preemption_meter = PreemptionMeter(parts.metrics.engine)
        self.read_backs = ReadBackTotals()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.parts.tokenizer

    @property
    def model(self) -> ServedModel:
        """The model as clients see it."""
        return self.parts.model

    @property
    def is_healthy(self) -> bool:
        """Whether new requests can be served."""
        return self.parts.figures().is_alive and not self._is_shutting_down

    def begin_shutdown(self) -> None:
        """Refuse new requests, those on open connections too."""
        self._is_shutting_down = True

    def close(self) -> None:
        """Let nothing more reach the loop; safe to repeat."""
        self._bridge.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def require_model(self, name: str | None) -> str:
        """Return the name that the answer carries. Raises ``RequestError`` (404) for another."""
        names = self.model.names
        if name is None or name == "":
            return names[0]
        if name not in names:
            raise RequestError(
                f"The model `{name}` does not exist; this instance serves `{names[0]}`.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return name

    async def run_for(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Return ``work()``: here for a short text, else on a thread, so that streams go on."""
        if num_chars <= self.parts.http.inline_tokenize_chars:
            return work()
        return await self._loop.run_in_executor(self._threads, work)

    def trusted_transfer(
        self,
        value: object,
        *,
        body: bytes,
        signature: str | None,
    ) -> KvTransferParams | None:
        """Return the transfer parameters in ``value``, None if there are none or not to be trusted.

        Raises ``RequestError`` if they are trusted and wrong, or cannot be served here.
        """
        if value is None or not self._is_signed(value, body, signature):
            return None
        # Only routers and instances have the key.
        is_from_peer = self.parts.cluster_key is not None
        params = parse_params(value, from_peer=is_from_peer)
        if self.parts.connector is None:
            raise RequestError(
                "this instance exchanges no KV: kv_transfer_params cannot be served",
                param="kv_transfer_params",
                code="unsupported_parameter",
            )
        if params.transfer_id in self._live_transfers:
            raise RequestError(
                f"transfer {params.transfer_id} is already in use here",
                param="kv_transfer_params.transfer_id",
                code="transfer_in_use",
                status=409,
            )
        return params

    def _is_signed(self, value: object, body: bytes, signature: str | None) -> bool:
        transfer_id = value.get("transfer_id") if isinstance(value, dict) else None
        reason = self._why_unsigned(transfer_id, body, signature)
        if reason:
            _log.warning("kv_transfer_params ignored", extra={"fields": {"reason": reason}})
        return not reason

    def _why_unsigned(self, transfer_id: object, body: bytes, signature: str | None) -> str:
        """Return why ``body`` is not signed for ``transfer_id``, and count it; empty: it is."""
        key = self.parts.cluster_key
        if key is None:
            return ""
        try:
            signed_id = verify(key, body, signature or "", self.parts.wall_time_s())
        except RemoteProtocolError as error:
            reason = str(error)
        else:
            if transfer_id == signed_id:
                return ""
            reason = "the signature is for another transfer"
        self.parts.metrics.exchange.unsigned_params.inc()
        return reason

    def generation(self, requests: Sequence[EngineRequest]) -> Generation:
        """Return the generation of ``requests``, to be entered.

        Raises ``ShuttingDownError`` once the process is about to end.
        """
        if self._is_shutting_down:
            raise ShuttingDownError("the server is shutting down")
        return Generation(
            self.parts.engine,
            self._bridge,
            requests,
            withdraw=self._withdraw,
        )

    def note_transfer_begun(self, request: EngineRequest) -> None:
        """``request`` takes part in a transfer from now on."""
        if request.transfer is not None:
            self._live_transfers[request.transfer.transfer_id] = request.request_id

    def note_transfer_ended(self, request: EngineRequest) -> None:
        """``request`` has been answered or given up."""
        if request.transfer is not None:
            self._live_transfers.pop(request.transfer.transfer_id, None)

    def cancel_transfer(self, transfer_id: TransferId, signature: str | None) -> None:
        """End whatever this instance does for ``transfer_id``; unknown ids are ignored.

        Raises ``RequestError`` (403) if there is a key and ``signature`` was not made with it.
        """
        reason = self._why_unsigned(transfer_id, b"", signature)
        if reason:
            named = self.parts.user_key_file or "the cluster key"
            raise RequestError(
                f"{reason}: sign with {named}, in the header {SIGNATURE_HEADER}",
                code="unsigned",
                status=403,
            )
        request_id = self._live_transfers.get(transfer_id)
        if request_id is not None:
            self.parts.engine.abort(request_id)
        # A receive is the engine's to end: it may be about to give it blocks.
        self._withdraw(transfer_id)

    def _withdraw(self, transfer_id: TransferId) -> None:
        if self.parts.connector is not None:
            self.parts.connector.withdraw(transfer_id)
