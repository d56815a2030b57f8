"""The router's HTTP routes: how many requests run at once, and the small answers of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager

import msgspec
from aiohttp import web

from kvferry.errors import RequestError
from kvferry.observe.metrics import CONTENT_TYPE
from kvferry.protocol.headers import REQUEST_ID_HEADER
from kvferry.protocol.keys import is_loopback
from kvferry.protocol.params import Role
from kvferry.protocol.signing import SIGNATURE_HEADER
from kvferry.router import answers
from kvferry.router.fleet.registry import Health, InstanceView
from kvferry.router.headers import acceptable_request_id, answer_headers, request_headers
from kvferry.router.metrics import Outcome
from kvferry.router.request.plan import ANYBODY, choose_decode
from kvferry.router.request.run import run
from kvferry.router.request.state import RequestState, Tools
from kvferry.router.upstream import LegAnswer, LegFailedError

COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")
_CUT_TIMEOUT_S = 1.0
_NOT_ALLOWED = RequestError(
    "only who is on this host may ask this, as JSON, signed where the router has a key",
    code="not_allowed",
    status=403,
)


class Admission:
    """Admits up to ``max_inflight`` requests; each place is given back however it ends.

    Event loop's thread only.
    """

    def __init__(self, max_inflight: int) -> None:
        self.max_inflight = max_inflight
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_inflight(self) -> int:
        """Requests admitted and not ended."""
        return len(self._tasks)

    @contextmanager
    def place(self) -> Iterator[bool]:
        """Take a place for the current task for the length of the block; yield whether it did."""
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= self.max_inflight:
            yield False
            return
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield True
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until none is left; the caller sets the deadline."""
        await self._idle.wait()

    async def drain(self, timeout_s: float) -> int:
        """Wait up to ``timeout_s`` for all to end, cancel the rest; return how many were cut."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_CUT_TIMEOUT_S)
            return len(left)
        return 0


class _DrainOrder(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    is_draining: bool


class Routes:
    """The handlers of one router."""

    def __init__(self, tools: Tools, admission: Admission) -> None:
        self._tools = tools
        self._admission = admission

    def application(self) -> web.Application:
        """Return the application; bodies above the limit are refused while they are read."""
        app = web.Application(client_max_size=self._tools.config.max_body_bytes)
        for path in COMPLETION_PATHS:
            app.router.add_post(path, self.complete)
        app.router.add_get("/v1/models", self.models)
        for path in ("/tokenize", "/detokenize"):
            app.router.add_post(path, self.tokenize)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/kvferry/fleet", self.fleet)
        app.router.add_post("/kvferry/fleet/draining", self.drain)
        app.router.add_route("*", "/{tail:.*}", self.unknown)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion, streamed or whole."""
        tools = self._tools
        request_id = _request_id(request)
        with self._admission.place() as is_admitted:
            if is_admitted:
                state = RequestState(
                    tools=tools,
                    request=request,
                    request_id=request_id,
                    headers=request_headers(request.headers, request_id),
                    arrived_s=tools.clock.monotonic_s(),
                )
                response = await run(state)
            else:
                tools.figures.requests[Outcome.OVERLOADED].inc()
                response = answers.overloaded(self._admission.max_inflight).as_response()
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = request_id
        return response

    async def models(self, request: web.Request) -> web.Response:
        """Pass on what a decode instance serves."""
        headers = request_headers(request.headers, _request_id(request))
        return await self._pass_on(
            request, lambda url: self._tools.upstream.get(url, request.path, headers)
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        """Have a decode instance turn text into tokens or back."""
        upstream = self._tools.upstream
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            error = answers.body_too_large(self._tools.config.max_body_bytes)
            return answers.of_request_error(error).as_response()
        headers = request_headers(request.headers, _request_id(request))

        async def ask(url: str) -> LegAnswer:
            response = await upstream.post(url, request.path, body, headers)
            with closing(response):
                return await upstream.read_all(response)

        return await self._pass_on(request, ask)

    async def _pass_on(
        self, request: web.Request, ask: Callable[[str], Awaitable[LegAnswer]]
    ) -> web.Response:
        tools = self._tools
        view = choose_decode(ANYBODY, tools.fleet.snapshot()).view
        if view is None:
            return answers.no_instance("decode").as_response()
        limit_s = tools.config.prefill_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with tools.fleet.waits(view.url).of_leg():
                    answer = await ask(view.url)
        except LegFailedError as error:
            tools.note_failure(view, error)
            return answers.leg_failed("decode", str(error)).as_response()
        except TimeoutError:
            return answers.timed_out("the request", limit_s).as_response()
        return web.Response(
            status=answer.status,
            body=answer.body,
            headers=answer_headers(answer.headers, _request_id(request)),
        )

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while a prefill and a decode instance are healthy, else 503."""
        del request
        snapshot = self._tools.fleet.snapshot()
        num_healthy = {
            role.value: sum(
                view.health is Health.HEALTHY and not view.is_draining for view in snapshot.of(role)
            )
            for role in Role
        }
        is_well = all(num_healthy.values())
        status = "ok" if is_well else "unavailable"
        return _json_response(
            {"status": status, "num_healthy": num_healthy}, 200 if is_well else 503
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer with Prometheus' text."""
        del request
        tools = self._tools
        text = tools.figures.render(
            tools.fleet,
            tools.credits,
            self._admission.num_inflight,
            tools.recall.num_remembered(),
        )
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def fleet(self, request: web.Request) -> web.Response:
        """Answer with how every instance stands."""
        del request
        snapshot = self._tools.fleet.snapshot()
        shown = {role.value: [self._shown(view) for view in snapshot.of(role)] for role in Role}
        return _json_response(shown | {"num_inflight": self._admission.num_inflight}, 200)

    def _shown(self, view: InstanceView) -> dict[str, object]:
        return {
            "url": view.url,
            "health": view.health.value,
            "detail": self._tools.fleet.detail(view.url),
            "is_draining": view.is_draining,
            "num_inflight": view.num_inflight,
            "identity": msgspec.to_builtins(view.identity),
            "control_address": self._tools.config.engines.control_addresses.get(view.url),
        }

    async def drain(self, request: web.Request) -> web.Response:
        """Have an instance get nothing new, or again: for who is on this host and has the key."""
        body = await request.read()
        signature = request.headers.get(SIGNATURE_HEADER)
        is_local = request.remote is not None and is_loopback(request.remote)
        # No page in a browser may ask this: it would be asked first where JSON may go.
        is_json = request.content_type == "application/json"
        if not (is_local and is_json and self._tools.signer.has_signed(body, signature)):
            return answers.of_request_error(_NOT_ALLOWED).as_response()
        try:
            order = msgspec.json.decode(body, type=_DrainOrder)
            if order.url not in self._tools.fleet.urls:
                raise RequestError(f"{order.url} is not a configured instance", param="url")
        except msgspec.DecodeError as error:
            return answers.of_request_error(RequestError(str(error))).as_response()
        except RequestError as error:
            return answers.of_request_error(error).as_response()
        self._tools.fleet.set_draining(order.url, order.is_draining)
        return _json_response(msgspec.to_builtins(order), 200)

    async def unknown(self, request: web.Request) -> web.Response:
        """Answer 404 for what is none of the router's."""
        return answers.no_endpoint(request.method, request.path).as_response()


def _request_id(request: web.Request) -> str:
    given = request.headers.get(REQUEST_ID_HEADER)
    return (
        given
        if given is not None and acceptable_request_id(given)
        else f"req-{secrets.token_hex(12)}"
    )


def _json_response(value: object, status: int) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )
