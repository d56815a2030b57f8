"""The HTTP side of an instance, without an engine: what it shows, and how legs are answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvferry.client.control_port import ControlPorts
from kvferry.client.http_client import HttpClient
from kvferry.doctor.questions import Questions
from kvferry.protocol.keys import UserKeyFile
from kvferry.protocol.messages import InstanceInfo

Json = dict[str, Any]
LIMIT_S = 30.0


def offering(body: Json) -> Json:
    """What kvferry's prefill answers."""
    params = body["kv_transfer_params"]
    return {"kv_transfer_params": {"transfer_id": params["transfer_id"], "role": "decode"}}


def offering_as(info: InstanceInfo) -> Callable[[Json], Json]:
    """What FerryConnector's prefill answers: who holds the blocks, too."""
    peer = {
        "instance_id": info.instance_id,
        "epoch": info.epoch,
        "control_address": info.control_address,
    }

    def offer(body: Json) -> Json:
        offered = offering(body)
        return {"kv_transfer_params": {**offered["kv_transfer_params"], "peer": peer}}

    return offer


def plainly(_: Json) -> Json:
    """An answer that tells nothing."""
    return {"choices": []}


def reporting(**report: object) -> Callable[[Json], Json]:
    """What kvferry's decode answers, with that ``kv_report``."""
    return lambda _: {"choices": [], "kv_report": report}


@dataclass(slots=True)
class FakeInstance:
    """One instance; ``info`` is shown over HTTP where it is not None, as kvferry's engine does."""

    info: InstanceInfo | None = None
    prefill: Callable[[Json], Json] = offering
    decode: Callable[[Json], Json] = plainly
    status: int = 200
    receives: dict[str, int] = field(default_factory=dict)
    """Shown among the metrics, by outcome."""
    counts: str = ""
    """The outcome that each decode leg adds to."""
    user_key: UserKeyFile | None = None
    fleet: Json | None = None
    """Shown as a router does."""
    bodies: list[Json] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    headers: list[Json] = field(default_factory=list)
    url: str = ""

    async def complete(self, request: web.Request) -> web.Response:
        body: Json = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        role = body.get("kv_transfer_params", {}).get("role", "")
        if self.status != 200:
            return web.Response(status=self.status, text="it burns")
        if role == "prefill":
            return web.json_response(self.prefill(body))
        if role == "decode" and self.counts:
            self.receives[self.counts] = self.receives.get(self.counts, 0) + 1
        return web.json_response(self.decode(body))

    async def withdraw(self, request: web.Request) -> web.Response:
        self.withdrawn.append(request.match_info["id"])
        self.headers.append(dict(request.headers))
        return web.Response(status=204)

    async def show(self, request: web.Request) -> web.Response:
        answers: dict[str, object] = {
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": 4096}]},
        }
        if self.fleet is not None:
            answers["/kvferry/fleet"] = self.fleet
        if self.info is not None:
            answers["/kvferry/instance"] = self._shown(self.info)
        else:
            answers["/version"] = {"version": "0.32.0"}
        if request.path == "/health":
            return web.Response()
        if request.path == "/metrics":
            return web.Response(text=self._metrics())
        if request.path not in answers:
            return web.Response(status=404)
        return web.Response(body=json.dumps(answers[request.path]), content_type="application/json")

    def _shown(self, info: InstanceInfo) -> Json:
        shown: Json = msgspec.to_builtins(info, builtin_types=(bytes,))
        return {
            **shown,
            "fingerprint": info.fingerprint.hex(),
            "num_requests_running": 0,
            "user_key": msgspec.to_builtins(self.user_key),
        }

    def _metrics(self) -> str:
        return "".join(
            f'kvferry_receives_total{{mode="pull",outcome="{outcome}"}} {count}\n'
            for outcome, count in self.receives.items()
        )


@asynccontextmanager
async def served(*instances: FakeInstance, key: bytes | None = None) -> AsyncIterator[Questions]:
    """Serve them on free ports; gives what to ask them with."""
    runners = []
    try:
        for instance in instances:
            app = web.Application()
            app.router.add_post("/v1/completions", instance.complete)
            app.router.add_delete("/kvferry/transfers/{id}", instance.withdraw)
            app.router.add_get("/{tail:.*}", instance.show)
            runner = web.AppRunner(app)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            instance.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        with contextlib.closing(ControlPorts(key)) as ports:
            async with aiohttp.ClientSession() as session:
                yield Questions(HttpClient(session, LIMIT_S), ports)
    finally:
        for runner in runners:
            await runner.cleanup()
