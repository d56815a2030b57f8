"""The router's HTTP routes: each hands over to the pipeline, or passes a small answer on."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from kvferry.clock import Clock
from kvferry.protocol.client_headers import REQUEST_ID_HEADER
from kvferry.protocol.params import Role
from kvferry.router import answers
from kvferry.router.admission import Admission
from kvferry.router.fleet.registry import Health, InstanceView
from kvferry.router.headers import (
    acceptable_request_id,
    answer_headers,
    request_headers,
)
from kvferry.router.metrics import CONTENT_TYPE
from kvferry.router.request.context import Outcome, RequestContext
from kvferry.router.request.run import Pipeline
from kvferry.router.request.state import StepTools
from kvferry.router.upstream import LegAnswer, LegFailedError, closing_leg

COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The handlers of one router."""

    tools: StepTools
    pipeline: Pipeline
    admission: Admission
    clock: Clock

    def application(self) -> web.Application:
        """Return the application; bodies above the limit are refused while they are read."""
        app = web.Application(client_max_size=self.tools.config.max_body_bytes)
        for path in COMPLETION_PATHS:
            app.router.add_post(path, self.complete)
        app.router.add_get("/v1/models", self.models)
        for path in ("/tokenize", "/detokenize"):
            app.router.add_post(path, self.tokenize)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/kvferry/fleet", self.fleet)
        app.router.add_route("*", "/{tail:.*}", self.unknown)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion, streamed or whole."""
        request_id = _request_id(request)
        with self.admission.place() as is_admitted:
            if not is_admitted:
                self.tools.figures.requests[Outcome.OVERLOADED].inc()
                response: web.StreamResponse = answers.overloaded(
                    self.admission.max_inflight
                ).as_response()
            else:
                context = RequestContext(
                    request=request,
                    path=request.path,
                    request_id=request_id,
                    headers=request_headers(request.headers, request_id),
                    arrived_s=self.clock.monotonic_s(),
                )
                response = await self.pipeline.run(context)
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = request_id
        return response

    async def models(self, request: web.Request) -> web.Response:
        """Pass on what a decode instance serves."""
        headers = request_headers(request.headers, _request_id(request))
        return await self._pass_on(
            request, lambda url: self.tools.upstream.get(url, request.path, headers)
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        """Have a decode instance turn text into tokens or back."""
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return answers.body_too_large(self.tools.config.max_body_bytes).as_response()
        headers = request_headers(request.headers, _request_id(request))

        async def ask(url: str) -> LegAnswer:
            response = await self.tools.upstream.post(url, request.path, body, headers)
            with closing_leg(response):
                return await self.tools.upstream.read_all(response)

        return await self._pass_on(request, ask)

    async def _pass_on(
        self, request: web.Request, ask: Callable[[str], Awaitable[LegAnswer]]
    ) -> web.Response:
        view = self.tools.choose(Role.DECODE, [])
        if view is None:
            return answers.no_instance("decode").as_response()
        limit_s = self.tools.config.prefill_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with self.tools.waits.of_leg(view.url):
                    answer = await ask(view.url)
        except LegFailedError as error:
            self.tools.note_failure(view, error)
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
        snapshot = self.tools.fleet.snapshot()
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
        text = self.tools.figures.render(
            self.tools.fleet,
            self.tools.credits,
            self.admission.num_inflight,
            self.tools.recall.num_remembered(),
        )
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def fleet(self, request: web.Request) -> web.Response:
        """Answer with how every instance stands."""
        del request
        snapshot = self.tools.fleet.snapshot()
        shown = {role.value: [self._shown(view) for view in snapshot.of(role)] for role in Role}
        return _json_response(shown | {"num_inflight": self.admission.num_inflight}, 200)

    def _shown(self, view: InstanceView) -> dict[str, object]:
        return {
            "url": view.url,
            "health": view.health.value,
            "detail": self.tools.fleet.detail(view.url),
            "is_draining": view.is_draining,
            "num_inflight": view.num_inflight,
            "identity": msgspec.to_builtins(view.identity),
            "control_address": self.tools.config.engines.control_addresses.get(view.url),
        }

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
