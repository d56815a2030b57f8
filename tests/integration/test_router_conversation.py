"""Later turns of a conversation: prefill is told who holds it, and who holds it decodes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.protocol.params import parse_params
from kvferry.router.config import ConversationConfig, OnPrefillFailure, ReadBack
from tests.integration.router_setup import PATH, Deployment, deployment
from tests.integration.test_router_cancel import Caller
from tests.support.fake_clock import FakeClock
from tests.support.scripted_engine import DEFAULT_EVENTS, Received, Script, ScriptedEngine

ALL = ("pull", "push", "history")
CHAT = "/v1/chat/completions"
_LOOKUPS = "kvferry_router_conversation_lookups_total"


class Conversation:
    """A chat that grows by two messages a turn; ``named`` says where its id stands."""

    def __init__(
        self, world: Deployment, named: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._world = world
        self._named = named
        self._headers = dict(headers or {})
        self.messages = [{"role": "system", "content": "be brief"}]

    async def turn(self, *, stream: bool = True, **extra: str) -> ScriptedEngine:
        """Send the next turn, to its end; return the decode instance that answered it."""
        number = len(self.messages)
        self.messages.append({"role": "user", "content": f"question {number}"})
        body: dict[str, Any] = {"messages": self.messages, "stream": stream}
        headers = self._headers | {name.replace("_", "-"): text for name, text in extra.items()}
        if self._named.startswith("X-"):
            headers[self._named] = "the conversation"
        elif self._named:
            body[self._named] = "the conversation"
        before = [len(engine.received) for engine in self._world.decode]
        async with self._world.post(body, CHAT, headers) as response:
            answer = await response.read()
        assert response.status == 200, answer
        assert b"history" not in answer
        assert b"decode-" not in answer
        # What the client sends back need not be what was answered.
        self.messages.append({"role": "assistant", "content": f"something {number}"})
        after = [len(engine.received) for engine in self._world.decode]
        (answering,) = [
            engine
            for engine, old, new in zip(self._world.decode, before, after, strict=True)
            if new > old
        ]
        return answering


def hint(received: Received) -> Mapping[str, Any] | None:
    """The holder that a prefill leg was told of, if it was."""
    assert received.params is not None
    history: Mapping[str, Any] | None = received.params.get("history")
    return history


def peer(engine: ScriptedEngine) -> dict[str, Any]:
    return {
        "instance_id": engine.name,
        "epoch": engine.epoch,
        "control_address": "tcp://127.0.0.1:1",
    }


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("named", ["X-Session-ID", "X-Conversation-ID", "conversation_id", ""])
async def test_every_later_turn_is_read_back(named: str, stream: bool, mode: str) -> None:
    async with deployment(1, 3, capabilities=ALL) as world:
        conversation = Conversation(world, named, {"X-KVFerry-Mode": mode})
        holder = await conversation.turn(stream=stream)
        for _ in range(20):
            assert await conversation.turn(stream=stream) is holder
        hints = [hint(received) for received in world.p.received]
        assert hints == [None] + [peer(holder)] * 20
        assert all(parse_params(received.params).history for received in world.p.received[1:])
        found = "id" if named else "prefix"
        assert await world.metric(_LOOKUPS, result=found) == 20
        assert await world.metric(_LOOKUPS, result="miss") == 1
        assert await world.metric("kvferry_router_history_hints_total") == 20
        assert await world.metric("kvferry_router_holder_choices_total", choice="holder") == 20
        assert await world.metric("kvferry_router_handoffs_total", mode=mode) == 21
        num_remembered = await world.metric("kvferry_router_conversations")
        assert num_remembered == (22 if named else 21)


@pytest.mark.parametrize("kind", ["text", "ids"])
async def test_every_later_prompt_is_read_back(kind: str) -> None:
    prompt: list[int] = list(range(1000, 1090))
    async with deployment(1, 3, capabilities=ALL) as world:
        for _ in range(21):
            sent = " ".join(map(str, prompt)) if kind == "text" else prompt
            async with world.post({"prompt": sent, "stream": True}) as response:
                await response.read()
            prompt = prompt + [len(prompt)] * 90
        (holder,) = [engine for engine in world.decode if engine.received]
        hints = [hint(received) for received in world.p.received]
        assert hints == [None] + [peer(holder)] * 20


async def test_turns_are_told_apart_by_api_key() -> None:
    async with deployment(1, 3, capabilities=ALL) as world:
        for headers in ({"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}, {}):
            await Conversation(world, "X-Session-ID", headers).turn()
        assert [hint(received) for received in world.p.received] == [None] * 3
        assert await world.metric(_LOOKUPS, result="miss") == 3


@pytest.mark.parametrize("named", ["session_id", ""])
async def test_a_holder_that_was_started_anew_is_not_asked(named: str) -> None:
    async with deployment(1, 2, capabilities=ALL) as world:
        conversation = Conversation(world, named)
        holder = await conversation.turn()
        holder.epoch = 2
        await world.router.probe_all()
        holder = await conversation.turn()
        assert hint(world.p.received[-1]) is None
        assert await world.metric(_LOOKUPS, result="stale") == 1
        assert await conversation.turn() is holder  # and from then on it is
        assert hint(world.p.received[-1]) == peer(holder)


async def test_a_holder_that_is_down_is_neither_asked_nor_chosen() -> None:
    async with deployment(1, 2, capabilities=ALL) as world:
        conversation = Conversation(world)
        holder = await conversation.turn()
        holder.health_status = 503
        await world.router.probe_all()
        assert await conversation.turn() is not holder
        assert hint(world.p.received[-1]) is None


async def test_a_draining_holder_is_asked_and_not_chosen() -> None:
    async with deployment(1, 2, capabilities=ALL) as world:
        conversation = Conversation(world)
        holder = await conversation.turn()
        world.router.fleet.set_draining(holder.url, True)
        assert await conversation.turn() is not holder
        assert hint(world.p.received[-1]) == peer(holder)
        assert await world.metric("kvferry_router_holder_choices_total", choice="elsewhere") == 1


async def test_read_back_is_switched_off_by_request_or_router() -> None:
    off = ConversationConfig(read_back=ReadBack.OFF)
    async with (
        deployment(1, 2, capabilities=ALL) as world,
        deployment(1, 2, capabilities=ALL, conversations=off) as world_without,
    ):
        for one, header, default in ((world, "off", 1), (world_without, "auto", 0)):
            conversation = Conversation(one)
            holder = await conversation.turn()
            assert await conversation.turn() is holder
            assert await conversation.turn(X_KVFerry_Read_Back=header) is holder
            hints = [hint(received) is not None for received in one.p.received]
            assert hints == [False, bool(default), not default]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("X-KVFerry-Read-Back", "on", "auto, off"),
        ("X-KVFerry-Retention-S", "long", "0 to 86400"),
        ("X-KVFerry-Readback", "off", "the nearest is 'X-KVFerry-Read-Back'"),
    ],
)
async def test_headers_that_ask_for_nothing_are_refused(
    name: str, value: str, allowed: str
) -> None:
    async with deployment(capabilities=ALL) as world:
        async with world.post({"prompt": "a"}, headers={name: value}) as response:
            error = (await response.json())["error"]
        assert response.status == 400
        assert error["param"] == name
        assert allowed in error["message"]
        assert world.p.received == world.d.received == []
        assert await world.outcomes() == {"bad_request": 1}


@pytest.mark.parametrize("wrong", [5, ["a"], {"a": 1}, "x" * 5000], ids=type)
async def test_a_wrong_id_is_refused(wrong: object) -> None:
    async with deployment(capabilities=ALL) as world:
        bodies: list[tuple[object, dict[str, str], str]] = [
            ({"prompt": "a", "session_id": wrong}, {}, "session_id")
        ]
        if isinstance(wrong, str):
            bodies.append(({"prompt": "a"}, {"X-Session-ID": wrong}, "X-Session-ID"))
        for body, headers, param in bodies:
            async with world.post(body, headers=headers) as response:
                error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param)
        assert world.p.received == world.d.received == []


async def test_headers_of_a_conversation_end_at_the_router() -> None:
    async with deployment(capabilities=ALL) as world:
        await Conversation(world).turn(X_KVFerry_Read_Back="auto", X_KVFerry_Retention_S="5")
        for received in world.p.received + world.d.received:
            assert not [name for name in received.headers if name.lower().startswith("x-kvferry")]


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_prefill_tried_again_elsewhere_keeps_the_hint(mode: str) -> None:
    retry = OnPrefillFailure.RETRY
    async with deployment(2, 2, capabilities=ALL, on_prefill_failure=retry) as world:
        conversation = Conversation(world, "", {"X-KVFerry-Mode": mode})
        holder = await conversation.turn()
        (first,) = [engine for engine in world.prefill if engine.received]
        (failing,) = [engine for engine in world.prefill if engine is not first]
        first.received.clear()
        failing.prefill = Script(status=500)
        gate = holder.decode.before_headers = asyncio.Event()
        turn = asyncio.create_task(conversation.turn())
        await first.wait_until(lambda: len(first.received) == 1)
        gate.set()
        assert await turn is holder
        for engine in world.prefill:
            assert [hint(received) for received in engine.received] == [peer(holder)]


async def test_only_prefill_instances_that_can_read_back_are_told() -> None:
    async with deployment(1, 2, capabilities=ALL) as world:
        world.p.capabilities = ("pull", "push")
        await world.router.probe_all()
        conversation = Conversation(world)
        holder = await conversation.turn()
        assert await conversation.turn() is holder
        assert [hint(received) for received in world.p.received] == [None, None]


async def test_engines_that_say_nothing_of_themselves_keep_their_conversations() -> None:
    async with deployment(1, 3) as world:
        conversation = Conversation(world)
        holder = await conversation.turn()
        for _ in range(5):
            assert await conversation.turn() is holder
        assert all(hint(received) is None for received in world.p.received)


async def test_an_answer_broken_off_by_the_client_is_remembered() -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with deployment(1, 2, capabilities=ALL) as world:
        for engine in world.decode:
            engine.decode.before_event = {1: asyncio.Event()}
        caller = await Caller.call(world, {"messages": messages, "stream": True}, CHAT)
        await caller.reader.readuntil(b"one")
        (holder,) = [engine for engine in world.decode if engine.received]
        await caller.leave()
        await holder.wait_until(lambda: holder.num_left == 1)
        later = [*messages, {"role": "assistant", "content": "o"}, *messages]
        async with world.post({"messages": later}, CHAT) as response:
            assert response.status == 200
        assert hint(world.p.received[-1]) == peer(holder)
        assert len(holder.received) == 2


async def test_next_turn_may_come_before_the_last_one_is_over() -> None:
    end = asyncio.Event()
    async with deployment(1, 2, capabilities=ALL) as world:
        conversation = Conversation(world)
        script = Script(events=(*DEFAULT_EVENTS, b": that was all\n\n"), before_event={3: end})
        for engine in world.decode:
            engine.once.append(script)
        conversation.messages.append({"role": "user", "content": "hi"})
        body = {"messages": conversation.messages, "stream": True}
        async with world.post(body, CHAT) as response:
            await response.content.readuntil(b"[DONE]\n\n")
            (holder,) = [engine for engine in world.decode if engine.received]
            conversation.messages.append({"role": "assistant", "content": "one two"})
            for engine in world.decode:
                engine.once.clear()
            assert await conversation.turn() is holder
            assert hint(world.p.received[-1]) == peer(holder)
            end.set()
            await response.read()


async def test_a_failed_answer_is_not_remembered() -> None:
    async with deployment(1, 1, capabilities=ALL) as world:
        for script in (Script(status=400), Script(status=500)):
            world.d.once.append(script)
            async with world.post({"messages": [{"content": "a"}], "n": 2}, CHAT) as response:
                assert response.status >= 400
        assert await world.metric("kvferry_router_conversations") == 0


async def test_a_request_that_is_not_split_is_remembered() -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with deployment(1, 2, capabilities=ALL) as world:
        async with world.post({"messages": messages, "n": 2}, CHAT) as response:
            assert response.status == 200
        (holder,) = [engine for engine in world.decode if engine.received]
        later = [*messages, {"role": "assistant", "content": "o"}, *messages]
        async with world.post({"messages": later}, CHAT) as response:
            assert response.status == 200
        assert hint(world.p.received[-1]) == peer(holder)


async def test_turns_are_forgotten_when_their_retention_ends() -> None:
    clock = FakeClock()
    async with deployment(1, 2, capabilities=ALL, clock=clock) as world:
        conversation = Conversation(world, "session_id")
        await conversation.turn()
        clock.advance(479.0)
        await conversation.turn()
        clock.advance(480.0)
        await conversation.turn()
        assert [hint(received) is not None for received in world.p.received] == [False, True, False]
        assert await world.metric("kvferry_router_conversations") == 2


async def test_a_turn_is_remembered_from_the_end_of_its_answer_on() -> None:
    clock, gate = FakeClock(), asyncio.Event()
    async with deployment(1, 2, capabilities=ALL, clock=clock) as world:
        conversation = Conversation(world)
        for engine in world.decode:
            engine.once.append(Script(before_event={2: gate}))
        turn = asyncio.create_task(conversation.turn())
        async with asyncio.timeout(10):
            while not await world.metric("kvferry_router_conversations"):  # it has begun
                await asyncio.sleep(0)
        clock.advance(400.0)
        gate.set()
        holder = await turn
        await world.wait_settled()
        clock.advance(400.0)
        for engine in world.decode:
            engine.once.clear()
        assert await conversation.turn() is holder
        assert hint(world.p.received[-1]) == peer(holder)


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_asked_retention_reaches_decode_and_0_ends_the_conversation(mode: str) -> None:
    async with deployment(1, 1, capabilities=ALL) as world:
        conversation = Conversation(world, "session_id", {"X-KVFerry-Mode": mode})
        await conversation.turn()
        await conversation.turn(X_KVFerry_Retention_S="12.5")
        await conversation.turn(X_KVFerry_Retention_S="0")
        await conversation.turn()
        params = [parse_params(received.params) for received in world.d.received]
        assert [each.retention_s for each in params] == [None, 12.5, 0.0, None]
        hints = [hint(received) is not None for received in world.p.received]
        assert hints == [False, True, True, False]
        assert all(b"retention_s" not in received.raw for received in world.p.received)


async def test_only_instances_that_can_read_back_are_told_of_retention() -> None:
    async with deployment(capabilities=("pull",)) as world:
        await Conversation(world).turn(X_KVFerry_Retention_S="5")
        assert b"retention_s" not in world.d.received[0].raw


async def test_what_prefill_offers_stays_as_it_was_beside_the_retention() -> None:
    extra = {"new_in_next_version": {"a": [1.50, "\u2028", None]}}
    async with deployment(capabilities=ALL) as world:
        world.p.prefill.extra_params = extra
        headers = {"X-KVFerry-Retention-S": "5", "X-KVFerry-Mode": "pull"}
        async with world.post({"prompt": "a"}, headers=headers) as response:
            assert response.status == 200
        assert json.dumps(extra["new_in_next_version"]).encode() in world.d.received[0].raw
        params = world.d.received[0].params
        assert params is not None
        assert params["retention_s"] == 5


async def test_a_hint_in_a_refusal_is_not_shown() -> None:
    async with deployment(1, 1, capabilities=ALL) as world:
        conversation = Conversation(world)
        await conversation.turn()
        refusal = {"error": {"message": "no"}, "kv_transfer_params": {"history": peer(world.d)}}
        world.p.prefill = Script(status=400, body=json.dumps(refusal).encode())
        pull = {"X-KVFerry-Mode": "pull"}
        async with world.post({"messages": conversation.messages}, CHAT, pull) as response:
            assert await response.json() == {"error": {"message": "no"}}
        assert hint(world.p.received[-1]) == peer(world.d)


async def test_forged_hints_of_clients_reach_no_engine() -> None:
    forged = {"kv_transfer_params": {"history": {"instance_id": "evil"}}, "history": 1}
    async with deployment(1, 1, capabilities=ALL) as world:
        async with world.post({"prompt": "a", **forged}, PATH) as response:
            assert response.status == 200
        assert all(b"evil" not in each.raw for each in world.p.received + world.d.received)
        assert hint(world.p.received[0]) is None
