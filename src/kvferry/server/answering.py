"""One accepted request and its answer: run it on the engine, send it whole or streamed.

Owns the order of bytes on the connection and what happens when the client leaves. Knows neither
endpoint's fields: those are a ``Job`` by now.

A prefill leg is answered whole: with ``kv_transfer_params``, what the decode leg needs; without
them and with ``finish_reason`` "not_needed", status 200, where a push has been ended because decode
has all it needs. Where its progress is asked for, the whole answer is the last event of a stream
of ``{"kv_progress": {"num_computed_tokens": n, "num_prompt_tokens": m}}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from kvferry.engine.request import EngineRequest
from kvferry.errors import EngineError
from kvferry.protocol.params import Role
from kvferry.protocol.receive_note import RECEIVE_HEADER, stream_note
from kvferry.server.assembly import AnswerAssembly
from kvferry.server.errors import answer_for
from kvferry.server.formats import (
    AnswerFormat,
    Choice,
    Json,
    extras_of,
    usage_of,
    usage_so_far,
)
from kvferry.server.generation import Generation
from kvferry.server.metering import RequestMeter
from kvferry.server.output import ChoiceAssembler, ChoiceOptions, Delta
from kvferry.server.service import InstanceService
from kvferry.server.streaming import EventStream, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: what the engine runs, one request a choice, and how it is shown."""

    requests: Sequence[EngineRequest]
    format: AnswerFormat
    options: ChoiceOptions
    num_prompt_tokens: int
    """Of all prompts, each counted once."""
    is_streamed: bool
    include_usage: bool = False
    continuous_usage: bool = False
    skip_special_tokens: bool = True

    @property
    def is_prefill_leg(self) -> bool:
        """Whether the answer is for a router: it hands the blocks over."""
        transfer = self.requests[0].transfer
        return transfer is not None and transfer.role is Role.PREFILL

    @property
    def shows_progress(self) -> bool:
        """Whether the answer is for a router that follows the prefill."""
        return self.requests[0].wants_progress


async def answer(request: web.Request, service: InstanceService, job: Job) -> web.StreamResponse:
    """Run ``job`` and answer ``request``; leaving in any way ends its engine requests.

    Raises ``RequestError`` if the engine refuses it, ``EngineError`` if the engine fails before
    the status line has gone out; later, the error is the stream's last event.
    """
    for engine_request in job.requests:
        service.note_transfer_begun(engine_request)
    try:
        async with service.generation(job.requests) as generation:
            assembly = _assembly(service, job, generation)
            meter = RequestMeter(
                service.parts.metrics.engine, service.read_backs, service.parts.clock
            )
            meter.begin(job.num_prompt_tokens)
            if job.is_streamed and not job.is_prefill_leg:
                return await _stream(request, job, assembly, meter)
            if job.shows_progress:
                return await _stream_progress(request, job, assembly, meter, generation)
            return await _send_whole(request, job, assembly, meter, generation)
    finally:
        for engine_request in job.requests:
            service.note_transfer_ended(engine_request)


def _assembly(service: InstanceService, job: Job, generation: Generation) -> AnswerAssembly:
    assemblers, choices = [], []
    for index, request in enumerate(job.requests):
        stream = service.tokenizer.stream(
            skip_special_tokens=job.skip_special_tokens, prompt_token_ids=request.prompt_token_ids
        )
        assemblers.append(ChoiceAssembler(stream, job.options))
        choices.append(Choice(index=index, prompt_token_ids=request.prompt_token_ids))
    return AnswerAssembly(generation, assemblers, choices)


async def _send_whole(
    request: web.Request,
    job: Job,
    assembly: AnswerAssembly,
    meter: RequestMeter,
    generation: Generation,
) -> web.Response:
    while not assembly.is_finished:
        meter.note(await assembly.next_deltas())
    body = _whole_body(job, assembly)
    response = web.Response(body=msgspec.json.encode(body), content_type="application/json")
    outcome = _receive_outcome(assembly)
    if outcome:
        response.headers[RECEIVE_HEADER] = outcome
    if assembly.choices[0].handoff is not None:
        # Sent from here: if the client is gone by now, nobody will fetch the blocks.
        await response.prepare(request)
        await response.write_eof()
        _keep_handoff(request, generation)
    return response


def _whole_body(job: Job, assembly: AnswerAssembly) -> Json:
    choices = assembly.choices
    body = job.format.whole(choices, usage_of(choices, job.num_prompt_tokens))
    return body | extras_of(choices, with_report=job.options.wants_report)


def _keep_handoff(request: web.Request, generation: Generation) -> None:
    """The whole answer has been written: the handoff is the client's, if it is still there."""
    if request.transport is not None and not request.transport.is_closing():
        generation.keep_handoff()


async def _stream_progress(
    request: web.Request,
    job: Job,
    assembly: AnswerAssembly,
    meter: RequestMeter,
    generation: Generation,
) -> web.StreamResponse:
    """Send how far a prefill is, then its whole answer as one event."""
    stream = EventStream(request)
    try:
        while not assembly.is_finished:
            deltas = await assembly.next_deltas()
            meter.note(deltas)
            counts = [delta.num_computed_tokens for _, delta in deltas]
            await stream.send([_progress(job, count) for count in counts if count is not None])
    except EngineError as error:
        if not stream.is_begun:
            raise
        await stream.send([b"data: " + answer_for(error).encoded() + b"\n\n"])
    else:
        await stream.send([event(_whole_body(job, assembly))])
    await stream.end()
    _keep_handoff(request, generation)
    return stream.response


def _progress(job: Job, num_computed_tokens: int) -> bytes:
    shown = {
        "num_computed_tokens": num_computed_tokens,
        "num_prompt_tokens": job.num_prompt_tokens,
    }
    return event({"kv_progress": shown})


async def _stream(
    request: web.Request, job: Job, assembly: AnswerAssembly, meter: RequestMeter
) -> web.StreamResponse:
    stream = EventStream(request)
    try:
        while not assembly.is_finished:
            deltas = await assembly.next_deltas()
            meter.note(deltas)
            await stream.send([event(chunk) for chunk in _chunks(job, deltas)])
    except EngineError as error:
        if not stream.is_begun:
            raise
        await stream.send([b"data: " + answer_for(error).encoded() + b"\n\n"])
    else:
        if job.include_usage:
            usage = usage_of(assembly.choices, job.num_prompt_tokens)
            await stream.send([event(job.format.last_chunk(usage))])
    outcome = _receive_outcome(assembly)
    await stream.end(stream_note(outcome) if outcome else b"")
    return stream.response


def _receive_outcome(assembly: AnswerAssembly) -> str:
    """Return how the request's receive has ended; empty where there was none, or it has not."""
    reports = [choice.report for choice in assembly.choices if choice.report is not None]
    return next((report.receive_outcome for report in reports if report.receive_outcome), "")


def _chunks(job: Job, deltas: Sequence[tuple[Choice, Delta]]) -> list[Json]:
    chunks = []
    for choice, delta in deltas:
        is_first = not choice.is_begun
        choice.is_begun = True
        chunk = job.format.chunk(choice, delta, is_first=is_first)
        if delta.finish_reason is not None and job.options.wants_report:
            chunk |= extras_of([replace(choice, handoff=None)], with_report=True)
        if job.continuous_usage:
            chunk["usage"] = usage_so_far(job.num_prompt_tokens, delta.num_tokens)
        chunks.append(chunk)
    return chunks
