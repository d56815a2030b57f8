"""Which decode instance a later turn goes to: its holder, unless that is overloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvferry.router.config import ConversationConfig, DecodeChoice
from tests.integration.router_setup import Deployment, deployment
from tests.integration.test_router_conversation import ALL, CHAT, Conversation, hint, peer
from tests.support.scripted_engine import Script, ScriptedEngine

_CHOICES = "kvferry_router_holder_choices_total"
_SLACK = ConversationConfig(holder_slack_requests=1)
_CASES = [
    ("pull", DecodeChoice.EARLY),
    ("push", DecodeChoice.EARLY),
    ("push", DecodeChoice.LATE),
]


@asynccontextmanager
async def _busy(world: Deployment, engine: ScriptedEngine, num_legs: int) -> AsyncIterator[None]:
    """Keep ``num_legs`` plain streams open on ``engine``, each with a conversation of its own."""
    gate = asyncio.Event()
    others = [each for each in world.decode if each is not engine]
    for other in others:
        world.router.fleet.set_draining(other.url, True)
    num_before = len(engine.received)
    for _ in range(num_legs):
        engine.once.append(Script(before_headers=gate))

    async def stream(number: int) -> None:
        messages = [{"role": "user", "content": f"other {number}"}]
        async with world.post({"messages": messages, "n": 2, "stream": True}, CHAT) as response:
            await response.read()

    streams = [asyncio.create_task(stream(number)) for number in range(num_legs)]
    await engine.wait_until(lambda: len(engine.received) == num_before + num_legs)
    for other in others:
        world.router.fleet.set_draining(other.url, False)
    try:
        yield
    finally:
        gate.set()
        await asyncio.gather(*streams)


@pytest.mark.parametrize(("mode", "choice"), _CASES)
async def test_holder_is_chosen_while_it_is_not_overloaded(mode: str, choice: DecodeChoice) -> None:
    async with deployment(
        1, 2, capabilities=ALL, decode_choice=choice, conversations=_SLACK
    ) as world:
        conversation = Conversation(world, "", {"X-KVFerry-Mode": mode})
        holder = await conversation.turn()
        async with _busy(world, holder, 1):
            assert await conversation.turn() is holder
        assert await world.metric(_CHOICES, choice="holder") == 1


@pytest.mark.parametrize(("mode", "choice"), _CASES)
async def test_overloaded_holder_is_asked_and_not_chosen(mode: str, choice: DecodeChoice) -> None:
    async with deployment(
        1, 2, capabilities=ALL, decode_choice=choice, conversations=_SLACK
    ) as world:
        conversation = Conversation(world, "", {"X-KVFerry-Mode": mode})
        holder = await conversation.turn()
        async with _busy(world, holder, 2):
            other = await conversation.turn()
            assert other is not holder
            assert hint(world.p.received[-1]) == peer(holder)
            assert await conversation.turn() is other  # which holds it from now on
            assert hint(world.p.received[-1]) == peer(other)
        assert await world.metric(_CHOICES, choice="overloaded") == 1
        assert await world.metric(_CHOICES, choice="holder") == 1


@pytest.mark.parametrize("named", ["X-Session-ID", ""])
@pytest.mark.parametrize(("mode", "choice"), _CASES)
async def test_a_turn_that_is_not_read_back_changes_nothing_for_the_later_ones(
    mode: str, choice: DecodeChoice, named: str
) -> None:
    async with deployment(1, 3, capabilities=ALL, decode_choice=choice) as world:
        conversation = Conversation(world, named, {"X-KVFerry-Mode": mode})
        holder = await conversation.turn(X_KVFerry_Read_Back="off")
        for is_off in (False, True, True, False, False):
            extra = {"X_KVFerry_Read_Back": "off"} if is_off else {}
            assert await conversation.turn(stream=True, **extra) is holder
            assert hint(world.p.received[-1]) == (None if is_off else peer(holder))
        assert await world.metric(_CHOICES, choice="holder") == 5


async def test_late_choice_prefers_the_holder_over_free_blocks() -> None:
    async with deployment(1, 2, capabilities=ALL, decode_choice=DecodeChoice.LATE) as world:
        world.p.prefill = Script(progress=((0, 10), (6, 10), (10, 10)))
        conversation = Conversation(world)
        holder = await conversation.turn()
        holder.num_free_blocks = 1
        await world.router.probe_all()
        for _ in range(3):
            assert await conversation.turn() is holder
        assert await world.metric("kvferry_router_handoffs_total", choice="late") == 4


async def test_a_leg_that_the_holder_fails_goes_elsewhere() -> None:
    async with deployment(1, 2, capabilities=ALL) as world:
        conversation = Conversation(world, "", {"X-KVFerry-Mode": "pull"})
        holder = await conversation.turn()
        (other,) = [engine for engine in world.decode if engine is not holder]
        holder.once.append(Script(status=503))
        async with world.post(
            {"messages": [*conversation.messages, {"role": "user", "content": "more"}]},
            CHAT,
            {"X-KVFerry-Mode": "pull"},
        ) as response:
            assert response.status == 200
        assert (len(holder.received), len(other.received)) == (2, 1)
        assert await world.metric(_CHOICES, choice="holder") == 1
        assert await world.metric(_CHOICES, choice="elsewhere") == 1


async def test_a_holder_without_credit_is_not_waited_for() -> None:
    async with deployment(1, 2, capabilities=ALL, max_outstanding_handoffs=1) as world:
        conversation = Conversation(world)
        holder = await conversation.turn()
        gate = asyncio.Event()
        world.p.once.append(Script(before_headers=gate))

        async def send() -> int:
            body = {"messages": [*conversation.messages, {"role": "user", "content": "slow"}]}
            async with world.post(body, CHAT) as response:
                await response.read()
                return response.status

        num_before = len(world.p.received)
        holder.once.append(Script(before_headers=gate))
        slow = asyncio.create_task(send())
        await world.p.wait_until(lambda: len(world.p.received) == num_before + 1)
        assert await conversation.turn() is not holder
        assert hint(world.p.received[-1]) == peer(holder)
        gate.set()
        assert await slow == 200


async def test_conversations_with_one_system_prompt_are_spread() -> None:
    async with deployment(1, 2, capabilities=ALL) as world:
        conversations = [Conversation(world) for _ in range(40)]
        for number, conversation in enumerate(conversations):
            conversation.messages.append({"role": "user", "content": f"I am {number}"})
            await conversation.turn()
        shares = [len(engine.received) / 20 for engine in world.decode]
        assert max(shares) <= 1.5
        assert all(hint(received) is None for received in world.p.received)


async def test_prompts_that_share_a_long_beginning_are_spread() -> None:
    few_shot = "example " * 100
    async with deployment(1, 2, capabilities=ALL) as world:
        for number in range(20):
            async with world.post({"prompt": f"{few_shot}{number}"}) as response:
                assert response.status == 200
        assert [len(engine.received) for engine in world.decode] == [10, 10]
        assert all(hint(received) for received in world.p.received[1:])


async def test_forks_of_one_history_at_once_are_all_read_back() -> None:
    async with deployment(1, 2, capabilities=ALL) as world:
        trunk = Conversation(world)
        holder = await trunk.turn()

        async def fork(name: str) -> int:
            messages = [*trunk.messages, {"role": "user", "content": name}]
            async with world.post({"messages": messages, "stream": True}, CHAT) as response:
                await response.read()
                return response.status

        assert await asyncio.gather(*map(fork, "abc")) == [200] * 3
        assert [hint(received) for received in world.p.received] == [None] + [peer(holder)] * 3
        assert len(holder.received) == 4
