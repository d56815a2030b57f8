"""OpenAI's completions and chat completions, from a request's body to the last byte of its answer.

Owns which field means what, the order of bytes on the connection, and what happens when the client
leaves. Knows no tensor and no block.

A prefill leg is answered whole: with ``kv_transfer_params``, what the decode leg needs; without
them and with ``finish_reason`` "not_needed", status 200, where a push has been ended because decode
has all it needs. Where its progress is asked for, the whole answer is the last event of a stream
of ``{"kv_progress": {"num_computed_tokens": n, "num_prompt_tokens": m}}``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiohttp import web

from kvferry.engine.request import EngineRequest
from kvferry.errors import EngineError, RequestError
from kvferry.protocol.headers import RECEIVE_HEADER, refuse_unknown_headers, stream_note
from kvferry.protocol.ids import RequestId
from kvferry.protocol.params import PROGRESS_FIELD, KvTransferParams, Role
from kvferry.server.bodies import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    parse_body,
    sampling_params,
)
from kvferry.server.formats import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    Json,
    handoff_of,
    reports_of,
    usage_of,
    usage_so_far,
)
from kvferry.server.generation import Choice, ChoiceOptions, Delta, Generation
from kvferry.server.responses import EventStream, answer_for, event, json_response
from kvferry.server.service import SERVICE, InstanceService, Prompt

Body = CompletionRequest | ChatRequest


async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    return await _answer(request, CompletionRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    return await _answer(request, ChatRequest)


async def _answer(request: web.Request, kind: type[Body]) -> web.StreamResponse:
    """Check ``request``, run it and answer it; leaving in any way ends its engine requests.

    Raises ``RequestError`` if it is wrong or the engine refuses it, ``EngineError`` if the engine
    fails before the status line has gone out; later, the error is the stream's last event.
    """
    service = request.app[SERVICE]
    refuse_unknown_headers(request.headers)
    data = await request.read()
    body: Body = parse_body(data, kind)
    model = service.require_model(body.model)
    prompts = await _prompts(service, body)
    transfer = service.trusted_transfer(body.kv_transfer_params, request, data)
    is_prefill = transfer is not None and transfer.role is Role.PREFILL
    shapes = _format(service, body, model)
    requests = _engine_requests(body, prompts, transfer, shapes.answer_id)
    options = ChoiceOptions(
        # A prefill leg ends after one token anyway; decode says it, and so finds the stop string.
        stop_strings=() if is_prefill else body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        wants_report=bool(body.kv_report),
    )
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    async with service.generation(requests, options, num_prompt_tokens) as generation:
        run = _Run(request, body, shapes, generation, num_prompt_tokens)
        is_streamed = requests[0].wants_progress if is_prefill else bool(body.stream)
        if is_streamed:
            return await run.stream(is_prefill=is_prefill)
        return await run.send_whole()


async def _prompts(service: InstanceService, body: Body) -> list[Prompt]:
    """Return each prompt's tokens. Raises ``RequestError`` for one that cannot be had."""
    if isinstance(body, ChatRequest):
        return [await service.encode_chat(body.messages, body)]
    adds_special = body.add_special_tokens is not False
    return [
        await service.encode_text(prompt, add_special_tokens=adds_special)
        if isinstance(prompt, str)
        else service.checked_token_ids(prompt)
        for prompt in body.prompts()
    ]


def _format(service: InstanceService, body: Body, model: str) -> AnswerFormat:
    decode = service.tokenizer.decode
    is_chat = isinstance(body, ChatRequest)
    return (ChatFormat if is_chat else CompletionFormat)(
        answer_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(16)}",
        created_s=int(service.wall_time_s()),
        model=model,
        num_logprobs=body.num_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        token_text=lambda token: decode([token], skip_special_tokens=False),
    )


def _engine_requests(
    body: Body, prompts: Sequence[Prompt], transfer: KvTransferParams | None, answer_id: str
) -> list[EngineRequest]:
    """One a choice: all choices of the first prompt, then of the second, as OpenAI numbers them."""
    num_choices = body.n or 1
    if len(prompts) * num_choices > MAX_CHOICES:
        raise RequestError.invalid_value(
            "n",
            f"{len(prompts)} prompts with n = {num_choices} exceed {MAX_CHOICES} choices",
        )
    if not all(prompts):
        raise RequestError.invalid_value(
            "prompt",
            "the prompt has no tokens: give at least one",
        )
    if transfer is not None and len(prompts) * num_choices != 1:
        raise RequestError(
            f"{len(prompts)} prompts with n = {num_choices}, but kv_transfer_params hand over one "
            "choice of one prompt",
            param="n" if num_choices != 1 else "prompt",
            code="unsupported_value",
        )
    return [
        EngineRequest(
            request_id=RequestId(f"{answer_id}-{number * num_choices + choice}"),
            prompt_token_ids=prompt,
            sampling=sampling_params(body, choice),
            cache_salt=body.cache_salt or "",
            transfer=transfer,
            wants_progress=bool(body.kv_progress and transfer and transfer.role is Role.PREFILL),
        )
        for number, prompt in enumerate(prompts)
        for choice in range(num_choices)
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    """A request that the engine works on, and the connection that waits for its answer."""

    request: web.Request
    body: Body
    shapes: AnswerFormat
    generation: Generation
    num_prompt_tokens: int
    """Of all prompts, each counted once."""

    async def send_whole(self) -> web.Response:
        """Wait for the end of every choice, then answer."""
        while not self.generation.is_finished:
            await self.generation.next_deltas()
        response = json_response(self._whole())
        outcome = self._receive_outcome()
        if outcome:
            response.headers[RECEIVE_HEADER] = outcome
        if self.generation.choices[0].handoff is not None:
            # Sent from here: if the client is gone by now, nobody will fetch the blocks.
            await response.prepare(self.request)
            await response.write_eof()
            self._keep_handoff()
        return response

    async def stream(self, *, is_prefill: bool) -> web.StreamResponse:
        """Send every delta as it comes; of a prefill how far it is, and then its whole answer."""
        stream = EventStream(self.request)
        try:
            while not self.generation.is_finished:
                deltas = await self.generation.next_deltas()
                shown = self._progress(deltas) if is_prefill else self._chunks(deltas)
                await stream.send(event(payload) for payload in shown)
        except EngineError as error:
            if not stream.is_begun:
                raise
            await stream.send([answer_for(error).as_event()])
        else:
            if is_prefill:
                await stream.send([event(self._whole())])
            elif self.body.include_usage:
                await stream.send([event(self.shapes.last_chunk(self._usage()))])
        outcome = self._receive_outcome()
        await stream.end(stream_note(outcome) if outcome else b"")
        self._keep_handoff()
        return stream.response

    def _whole(self) -> Json:
        choices = self.generation.choices
        report = reports_of(choices) if self.body.kv_report else {}
        return self.shapes.whole(choices, self._usage()) | handoff_of(choices) | report

    def _usage(self) -> Json:
        return usage_of(self.generation.choices, self.num_prompt_tokens)

    def _progress(self, deltas: Sequence[tuple[Choice, Delta]]) -> Iterator[Json]:
        for _, delta in deltas:
            if delta.num_computed_tokens is not None:
                yield {
                    PROGRESS_FIELD: {
                        "num_computed_tokens": delta.num_computed_tokens,
                        "num_prompt_tokens": self.num_prompt_tokens,
                    }
                }

    def _chunks(self, deltas: Sequence[tuple[Choice, Delta]]) -> Iterator[Json]:
        for choice, delta in deltas:
            chunk = self.shapes.chunk(choice, delta)
            if delta.finish_reason is not None and self.body.kv_report:
                chunk |= reports_of([choice])
            if self.body.continuous_usage:
                chunk["usage"] = usage_so_far(self.num_prompt_tokens, delta.num_tokens)
            yield chunk

    def _receive_outcome(self) -> str:
        """Return how the request's receive has ended; empty where there was none, or it has not."""
        reports = (choice.report for choice in self.generation.choices)
        outcomes = (report.receive_outcome for report in reports if report is not None)
        return next((outcome for outcome in outcomes if outcome), "")

    def _keep_handoff(self) -> None:
        """The whole answer has been written: the handoff is the client's, if it is still there."""
        if self.request.transport is not None and not self.request.transport.is_closing():
            self.generation.keep_handoff()
