"""``InstanceService``: what the HTTP handlers share of one instance.

Owns the live transfers, the tokenising thread and the decision whether a request's transfer
parameters are trusted. Knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from kvferry.clock import Clock
from kvferry.engine.request import EngineRequest
from kvferry.errors import RemoteProtocolError, RequestError
from kvferry.observe.log import get_logger
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.protocol.params import KvTransferParams, parse_params
from kvferry.protocol.signing import SIGNATURE_HEADER, verify
from kvferry.server.bodies import ChatMessage, ChatRequest, TokenizeRequest
from kvferry.server.figures import InstanceFigures
from kvferry.server.generation import (
    Choice,
    ChoiceOptions,
    Generation,
    OutputBridge,
    RequestMeter,
    ShuttingDownError,
)
from kvferry.server.instance import Instance

_log = get_logger(__name__)

Prompt = tuple[int, ...]
Result = TypeVar("Result")


class InstanceService:
    """One instance's services to its handlers; all on the event loop that runs when it is made."""

    def __init__(
        self,
        instance: Instance,
        clock: Clock,
        *,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None:
        """``wall_time_s`` is Unix time, for ``created`` and for the expiry of signatures."""
        self.instance = instance
        self.tokenizer = instance.tokenizer
        self.model_names = instance.config.served_model_names or (instance.config.model,)
        """What clients may call the model; answers carry the first if they do not say."""
        self.created_s = int(wall_time_s())
        self.figures = InstanceFigures(instance)
        self.wall_time_s = wall_time_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._bridge = OutputBridge(self._loop)
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._live_transfers: dict[TransferId, RequestId] = {}
        self._is_shutting_down = False

    @property
    def is_healthy(self) -> bool:
        """Whether new requests can be served."""
        return self.instance.engine.failure is None and not self._is_shutting_down

    def begin_shutdown(self) -> None:
        """Refuse new requests, those on open connections too."""
        self._is_shutting_down = True

    def close(self) -> None:
        """Let nothing more reach the loop; safe to repeat."""
        self._bridge.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def require_model(self, name: str | None) -> str:
        """Return the name that the answer carries. Raises ``RequestError`` (404) for another."""
        names = self.model_names
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

    # -- prompts ------------------------------------------------------------------------------

    async def run_for(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Return ``work()``: here for a short text, else on a thread, so that streams go on."""
        if num_chars <= self.instance.config.http.inline_tokenize_chars:
            return work()
        return await self._loop.run_in_executor(self._threads, work)

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> Prompt:
        """Return the tokens of ``text``."""
        encode = self.tokenizer.encode
        return await self.run_for(
            len(text), lambda: tuple(encode(text, add_special_tokens=add_special_tokens))
        )

    async def encode_chat(
        self, messages: Sequence[ChatMessage], request: ChatRequest | TokenizeRequest
    ) -> Prompt:
        """Return the tokens of ``messages`` as ``request`` wants them rendered.

        Raises ``RequestError`` if it wants both ends, or the chat template refuses the messages.
        """
        continues = bool(request.continue_final_message)
        if continues and request.add_generation_prompt:
            raise RequestError.invalid_value(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            )
        if not messages:
            raise RequestError("messages must not be empty", param="messages", code="invalid_value")
        conversation = [message.for_template(index) for index, message in enumerate(messages)]

        def encode() -> Prompt:
            text = self.tokenizer.render_chat(
                conversation,
                add_generation_prompt=request.add_generation_prompt is not False and not continues,
                continue_final_message=continues,
            )
            add_special_tokens = bool(request.add_special_tokens)
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

        num_chars = sum(len(message["content"]) for message in conversation)
        return await self.run_for(num_chars, encode)

    def checked_token_ids(self, token_ids: Sequence[int], *, param: str = "prompt") -> Prompt:
        """Return ``token_ids``. Raises ``RequestError`` for one that the model does not have."""
        vocabulary_size = self.instance.engine.model.vocabulary_size
        for token in token_ids:
            if not 0 <= token < vocabulary_size:
                raise RequestError.invalid_value(
                    param,
                    f"token id {token} is not between 0 and {vocabulary_size - 1}",
                )
        return tuple(token_ids)

    # -- generations --------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def generation(
        self, requests: Sequence[EngineRequest], options: ChoiceOptions, num_prompt_tokens: int
    ) -> AsyncIterator[Generation]:
        """Run ``requests``, one a choice, for as long as the context lasts.

        ``num_prompt_tokens`` counts each prompt once. Raises ``ShuttingDownError`` once the process
        is about to end, ``RequestError`` if the engine refuses one of them.
        """
        if self._is_shutting_down:
            raise ShuttingDownError("the server is shutting down")
        instance, read_backs = self.instance, self.figures.read_backs
        meter = RequestMeter(instance.metrics.engine, read_backs, self._clock, num_prompt_tokens)
        choices = [self._choice(index, request, options) for index, request in enumerate(requests)]
        live = {r.transfer.transfer_id: r.request_id for r in requests if r.transfer is not None}
        self._live_transfers |= live
        try:
            async with Generation(
                instance.engine,
                self._bridge,
                choices,
                meter,
                withdraw=instance.exchange.port.withdraw,
            ) as generation:
                yield generation
        finally:
            for transfer_id in live:
                self._live_transfers.pop(transfer_id, None)

    def _choice(self, index: int, request: EngineRequest, options: ChoiceOptions) -> Choice:
        stream = self.tokenizer.stream(
            skip_special_tokens=options.skip_special_tokens,
            prompt_token_ids=request.prompt_token_ids,
        )
        return Choice(index, request, stream, options)

    # -- transfers ----------------------------------------------------------------------------

    def trusted_transfer(
        self, value: object, request: web.Request, body: bytes
    ) -> KvTransferParams | None:
        """Return the transfer parameters in ``value``, None if there are none or not to be trusted.

        Raises ``RequestError`` if they are trusted and wrong, or cannot be served here.
        """
        if value is None:
            return None
        transfer_id = value.get("transfer_id") if isinstance(value, dict) else None
        reason = self._why_unsigned(transfer_id, request, body)
        if reason:
            _log.warning("kv_transfer_params ignored", extra={"fields": {"reason": reason}})
            return None
        # Only routers and instances have the key.
        is_from_peer = self.instance.config.exchange.cluster_key is not None
        params = parse_params(value, from_peer=is_from_peer)
        if params.transfer_id in self._live_transfers:
            raise RequestError(
                f"transfer {params.transfer_id} is already in use here",
                param="kv_transfer_params.transfer_id",
                code="transfer_in_use",
                status=409,
            )
        return params

    def cancel_transfer(self, transfer_id: TransferId, request: web.Request) -> None:
        """End whatever this instance does for ``transfer_id``; unknown ids are ignored.

        Raises ``RequestError`` (403) if there is a key and ``request`` is not signed with it.
        """
        reason = self._why_unsigned(transfer_id, request, b"")
        if reason:
            named = self.instance.config.exchange.user_key_file or "the cluster key"
            raise RequestError(
                f"{reason}: sign with {named}, in the header {SIGNATURE_HEADER}",
                code="unsigned",
                status=403,
            )
        request_id = self._live_transfers.get(transfer_id)
        if request_id is not None:
            self.instance.engine.abort(request_id)
        # A receive is the engine's to end: it may be about to give it blocks.
        self.instance.exchange.port.withdraw(transfer_id)

    def _why_unsigned(self, transfer_id: object, request: web.Request, body: bytes) -> str:
        """Return why ``body`` is not signed for ``transfer_id``, and count it; empty: it is."""
        key = self.instance.config.exchange.cluster_key
        if key is None:
            return ""
        signature = request.headers.get(SIGNATURE_HEADER, "")
        try:
            signed_id = verify(key, body, signature, self.wall_time_s())
        except RemoteProtocolError as error:
            reason = str(error)
        else:
            if transfer_id == signed_id:
                return ""
            reason = "the signature is for another transfer"
        self.instance.metrics.exchange.unsigned_params.inc()
        return reason


SERVICE = web.AppKey("service", InstanceService)
"""Where the application carries its service."""
