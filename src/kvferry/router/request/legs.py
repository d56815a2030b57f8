"""One attempt at a leg: a prefill leg until its answer, a decode leg until the client has its own.

A stream's bytes pass as they come; its events are looked at on the way. An engine that is stopped
ends what runs there with the finish reason ``abort``, under status 200, or with none at all: vLLM
streams nothing but ``[DONE]`` for what has no token yet. Such an answer lacks the rest of its
tokens, so it counts as a failure of the leg.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta
from multidict import CIMultiDict

from kvferry.client.sse import END, EventReader, data_of
from kvferry.protocol.headers import RECEIVE_HEADER, noted_outcome, without_note
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import Mode, Role
from kvferry.router import answers
from kvferry.router.answers import ForwardedStream, end_stream_with_error
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.fleet.silence import LegWait
from kvferry.router.headers import answer_headers
from kvferry.router.metrics import Outcome
from kvferry.router.request.state import RequestState
from kvferry.router.upstream import (
    LegAnswer,
    LegFailedError,
    LegFailure,
    require_well,
)

OnProgress = Callable[[float], None]
"""Told the computed share of the prompt, 0 to 1, from the prefill's admission on."""

EVENT_STREAM = "text/event-stream"
_JSON = {"Content-Type": "application/json"}
_MAX_OPENING_BYTES = 4096
_NOTHING = msgspec.Raw(b"")
_NO_ERROR = (b"", b"null")


# -- what an answer says ----------------------------------------------------------------------
class _Progress(msgspec.Struct):
    num_computed_tokens: Annotated[int, Meta(ge=0)]
    num_prompt_tokens: Annotated[int, Meta(ge=0)]


class _PrefillEvent(msgspec.Struct):
    kv_progress: _Progress | None = None
    error: msgspec.Raw = _NOTHING


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw = _NOTHING


class _FirstChoice(msgspec.Struct):
    finish_reason: str | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None

    @property
    def is_empty(self) -> bool:
        if self.finish_reason is not None or self.token_ids or self.delta is None:
            return False
        return not any(value for key, value in self.delta.items() if key != "role")

    @property
    def has_role(self) -> bool:
        return self.delta is not None and "role" in self.delta


class _FirstEvent(msgspec.Struct):
    choices: list[_FirstChoice] = []
    error: dict[str, Any] | None = None


_prefill_decoder = msgspec.json.Decoder(_PrefillEvent)
_event_decoder = msgspec.json.Decoder(_Event)
_first_decoder = msgspec.json.Decoder(_FirstEvent)


class PrefillEvents:
    """A prefill leg that is answered as a stream: how far it is, then its whole answer."""

    def __init__(self, max_answer_bytes: int) -> None:
        self._reader = EventReader(max_answer_bytes)
        self.answer: bytes | None = None
        """The last event that is not progress."""
        self.is_error = False
        """Whether ``answer`` is an error."""

    def feed(self, chunk: bytes) -> list[float]:
        """Return the progress that ``chunk`` told, as shares of the prompt, 0 to 1."""
        shares = (self._take(data_of(event)) for event in self._reader.feed(chunk))
        return [share for share in shares if share is not None]

    def _take(self, data: bytes) -> float | None:
        if not data or data == END:
            return None
        try:
            decoded = _prefill_decoder.decode(data)
        except (msgspec.DecodeError, RecursionError):
            decoded = _PrefillEvent()
        progress = decoded.kv_progress
        if progress is None:
            self.answer, self.is_error = data, bytes(decoded.error) not in _NO_ERROR
            return None
        return min(1.0, progress.num_computed_tokens / max(1, progress.num_prompt_tokens))


class DecodeEvents:
    """A decode leg's stream: whether its answer has begun, and whether it is whole."""

    def __init__(self) -> None:
        self._reader = EventReader()
        self._has_begun = False
        self._has_opened = False
        self._has_reason = False
        self.is_done = False
        """Whether the stream's last event has been seen: there is nothing more to come."""
        self.receive_outcome = ""
        """How decode says that its receive has ended; known with the last event."""
        self.error: bytes | None = None
        """The error that the answer begins with, as JSON."""

    @property
    def is_opening(self) -> bool:
        """Whether a chat's stream has told nothing yet but the answer's role.

        vLLM sends that as an event of its own, and may have aborted the request by then.
        """
        is_all = self._has_opened and not self._has_begun
        return is_all and not self.is_done and self._reader.is_between_events

    def feed(self, chunk: bytes) -> bytes:
        """Take in the next bytes; return what of them goes to the client.

        Raises ``LegFailedError`` if the engine has aborted.
        """
        was_done = self.is_done
        for event in self._reader.feed(chunk):
            data = data_of(event)
            if data == END:
                self._take_end()
            elif data:
                self._take(data)
            elif event.startswith(b":"):
                self.receive_outcome = noted_outcome(event + b"\n\n") or self.receive_outcome
        return without_note(chunk) if self.is_done and not was_done else chunk

    def _take_end(self) -> None:
        if not self._has_reason:
            raise _aborted()
        self.is_done = True

    def _take(self, data: bytes) -> None:
        self.is_done = False
        if not self._has_begun:
            self._take_first(data)
        try:
            event = _event_decoder.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return
        for choice in event.choices:
            if choice.finish_reason == "abort":
                raise _aborted()
            self._has_reason = self._has_reason or bool(choice.finish_reason)
        self._has_reason = self._has_reason or bytes(event.error) not in _NO_ERROR

    def _take_first(self, data: bytes) -> None:
        self._has_begun = True
        try:
            event = _first_decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            return
        if event.error is not None:
            self.error = data
            return
        self._has_opened = self._has_opened or any(choice.has_role for choice in event.choices)
        is_empty = all(choice.is_empty for choice in event.choices)
        self._has_begun = not (self._has_opened and is_empty)


def require_whole(body: bytes) -> None:
    """Raise ``LegFailedError`` if the engine has aborted a choice of the answer ``body``."""
    if b'"abort"' not in body:
        return
    try:
        choices = _event_decoder.decode(body).choices
    except (msgspec.MsgspecError, RecursionError):
        return
    if any(choice.finish_reason == "abort" for choice in choices):
        raise _aborted()


def _aborted() -> LegFailedError:
    return LegFailedError(
        LegFailure.ABORTED, "it has ended the request itself, as an instance does that is stopped"
    )


def _is_event_stream(headers: Mapping[str, str]) -> bool:
    content_type: str = headers.get("Content-Type", "")
    return content_type.partition(";")[0].strip().lower() == EVENT_STREAM


# -- prefill ----------------------------------------------------------------------------------
async def run_prefill_leg(
    state: RequestState,
    view: InstanceView,
    transfer_id: TransferId,
    mode: Mode,
    on_progress: OnProgress | None = None,
) -> LegAnswer:
    """Return the answer of ``view``, a success or a refusal. Raises ``LegFailedError``.

    ``on_progress``: not None asks for progress; an engine may answer without any all the same.
    """
    tools = state.tools
    history = None
    if state.conversation is not None:
        history = tools.recall.history_for(state.conversation, view)
    if history is not None:
        tools.figures.history_hints.inc()
    fields = view.dialect.prefill_fields(
        state.body.fields,
        transfer_id,
        mode,
        wants_progress=on_progress is not None,
        history=history,
    )
    body = msgspec.json.encode(fields)
    headers = state.leg_headers(view, body, transfer_id)
    limit_s = tools.config.prefill_timeout_s
    wait = tools.fleet.waits(view.url).of_leg()
    with (
        tools.fleet.open_ticket(view.url, Role.PREFILL),
        tools.figures.leg_seconds[Role.PREFILL].time(),
    ):
        try:
            async with asyncio.timeout(limit_s):
                with wait:
                    response = await tools.upstream.post(
                        view.url, state.request.path, body, headers
                    )
                with closing(response):
                    if on_progress is not None and _is_event_stream(response.headers):
                        answer = await _read_progress(state, response, wait, on_progress)
                    else:
                        answer = await tools.upstream.read_all(response, wait)
        except TimeoutError as error:
            raise LegFailedError(LegFailure.TIMEOUT, f"no answer within {limit_s:g} s") from error
        require_whole(require_well(answer).body)
        return answer


async def _read_progress(
    state: RequestState, response: aiohttp.ClientResponse, wait: LegWait, on_progress: OnProgress
) -> LegAnswer:
    max_bytes = state.tools.config.max_answer_bytes
    events = PrefillEvents(max_bytes)
    num_bytes = 0
    while chunk := await state.tools.upstream.read_some(response, wait):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise LegFailedError(LegFailure.TOO_LARGE, f"its answer exceeds {max_bytes} bytes")
        for share in events.feed(chunk):
            on_progress(share)
    if events.answer is None:
        raise LegFailedError(LegFailure.BROKEN, "its stream ended without an answer")
    # What an engine can refuse it has refused by status; an error in a stream is a failure.
    return LegAnswer(500 if events.is_error else response.status, _JSON, events.answer)


# -- decode -----------------------------------------------------------------------------------
class DecodeLeg:
    """A leg on ``view``; counted as in flight from here until ``close``."""

    def __init__(self, state: RequestState, view: InstanceView) -> None:
        tools = state.tools
        self._tools = tools
        self._state = state
        self.view = view
        self._ends = ExitStack()
        self._ends.enter_context(tools.fleet.open_ticket(view.url, Role.DECODE))
        self._ends.enter_context(tools.figures.leg_seconds[Role.DECODE].time())
        if state.holder_choice is not None:
            tools.figures.holder_choices[state.holder_choice].inc()
        self._wait = tools.fleet.waits(view.url).of_leg()
        self._begin_limit_s: float | None = None
        self._begin_deadline: asyncio.Timeout | None = None
        self._whole: LegAnswer | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._first = b""
        self._events = DecodeEvents()

    def close(self) -> None:
        """End the leg: an answer that was not read whole is cut off. Safe to repeat."""
        self._ends.close()

    def limit_begin(self) -> None:
        """Have a stream begin within the limit, from now; a whole answer may come at the end."""
        if not self._state.body.traits.is_stream:
            return
        self._begin_limit_s = limit_s = self._tools.config.prefill_timeout_s
        if self._begin_deadline is not None:
            self._begin_deadline.reschedule(asyncio.get_running_loop().time() + limit_s)

    async def open(self, body: bytes, headers: CIMultiDict[str]) -> None:
        """Send ``body``; wait until the first byte, or the whole answer, is here.

        Nothing goes to the client, so that another instance may still answer. Raises
        ``LegFailedError``.
        """
        try:
            async with asyncio.timeout(self._begin_limit_s) as self._begin_deadline:
                with self._wait:
                    response = await self._tools.upstream.post(
                        self.view.url, self._state.request.path, body, headers
                    )
                self._ends.enter_context(closing(response))
                if response.status == 200 and _is_event_stream(response.headers):
                    await self._begin_stream(response)
                else:
                    answer = await self._tools.upstream.read_all(response, self._wait)
                    require_whole(require_well(answer).body)
                    self._whole = answer
        except TimeoutError as error:
            limit_s = self._begin_limit_s or 0
            raise LegFailedError(LegFailure.TIMEOUT, f"no answer within {limit_s:g} s") from error
        finally:
            self._begin_deadline = None

    async def _begin_stream(self, response: aiohttp.ClientResponse) -> None:
        """Wait until the stream tells more than the role of who answers, or ends."""
        upstream, events = self._tools.upstream, self._events
        chunk = await upstream.read_some(response, self._wait)
        self._first = self._see(chunk)
        while chunk and events.is_opening and len(self._first) <= _MAX_OPENING_BYTES:
            chunk = await upstream.read_some(response, self._wait)
            self._first += self._see(chunk)
        if events.error is not None:
            # vLLM has answered 200 before it knows that a request fails.
            detail = "its stream began with an error"
            answer = LegAnswer(500, _JSON, events.error)
            raise LegFailedError(LegFailure.ENGINE_ERROR, detail, answer)
        self._response = response

    async def deliver(self) -> None:
        """Answer the client with what was opened.

        A stream that breaks off ends with an event that says so.
        """
        state, tools = self._state, self._tools
        tools.figures.first_byte_s.observe(tools.clock.monotonic_s() - state.arrived_s)
        whole = self._whole
        if self._response is not None:
            await self._stream(self._response)
        elif whole is not None:
            response = answers.passed_on(whole, state.request_id)
            if whole.status >= 400:
                state.finish(Outcome.BAD_REQUEST, response)
                return
            self._note_receive(whole.headers.get(RECEIVE_HEADER, ""))
            state.note_answer(self.view, whole.body)
            state.finish(state.good_outcome, response)

    async def _stream(self, response: aiohttp.ClientResponse) -> None:
        state = self._state
        headers = answer_headers(response.headers, state.request_id)
        stream = ForwardedStream(status=response.status, headers=headers)
        # Before the client has anything: its next turn may come before this one is over here.
        state.note_answer(self.view)
        await stream.prepare(state.request)
        state.stream = stream
        is_held = True
        try:
            await self._forward(response, stream)
        except LegFailedError as failure:
            is_held = False
            self._tools.note_failure(self.view, failure)
            error = answers.leg_failed("decode", str(failure))
            await end_stream_with_error(state.request, stream, error)
            state.finish(Outcome.DECODE_FAILED, stream)
        else:
            state.finish(state.good_outcome, stream)
        finally:
            if is_held:  # Also where the client has left: the instance retains all the same.
                state.note_answer(self.view)

    async def _forward(self, response: aiohttp.ClientResponse, stream: ForwardedStream) -> None:
        """Pass bytes on as they come; waits while the client reads slowly.

        Raises ``LegFailedError``, and ``ConnectionResetError`` when the client is gone.
        """
        read_some, events, wait = self._tools.upstream.read_some, self._events, self._wait
        chunk = self._first
        while chunk:
            await stream.write(chunk)
            if events.is_done:
                # The client has it all: one that closes now has not left.
                self._state.finish(self._state.good_outcome, stream)
            try:
                chunk = await read_some(response, wait)
            except LegFailedError:
                if not events.is_done:
                    raise
                break
            chunk = self._see(chunk)
        await stream.write_eof()

    def _see(self, chunk: bytes) -> bytes:
        """Look at what has come; return what of it goes to the client."""
        was_done = self._events.is_done
        chunk = self._events.feed(chunk)
        if self._events.is_done and not was_done:
            self._note_receive(self._events.receive_outcome)
        return chunk

    def _note_receive(self, outcome: str) -> None:
        if outcome:
            self._state.receive_outcome = outcome
            self._tools.figures.receive_ended(outcome)
