"""A test as the router of a conversation: it sends each leg and names the holder to prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.integration.deployment_client import (
    Answer,
    Client,
    Json,
    body_of,
    fresh_prompt,
    new_transfer,
    salted,
)
from tests.integration.deployment_setup import BOUND_S, Program
from tests.integration.push_legs import peer_of

BLOCK_TOKENS = 16
NUM_ANSWERED = 6
CLOSED_PORT = "tcp://127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation of two turns, and what is right for each. No cache knows its salt."""

    first: Json
    first_right: list[int]
    second: Json
    second_right: list[int]

    def again(self) -> Talk:
        """The same under another salt."""
        first = salted(self.first)
        second = self.second | {"cache_salt": first["cache_salt"]}
        return Talk(first, self.first_right, second, self.second_right)

    @property
    def num_held_tokens(self) -> int:
        """What the instance that answered the first turn holds: the last token has no KV."""
        return len(self.first["prompt"]) + len(self.first_right) - 1

    @property
    def num_held_blocks(self) -> int:
        """Blocks of those tokens, the last one filled in part or not."""
        return -(-self.num_held_tokens // BLOCK_TOKENS)


async def known_talk(client: Client, program: Program, num_tokens: int, num_new: int) -> Talk:
    """A conversation that ``program`` alone has computed, each turn from nothing."""
    first = body_of(fresh_prompt(num_tokens), NUM_ANSWERED)
    first_right = await client.plain(program, first)
    prompt = [*first["prompt"], *first_right, *fresh_prompt(num_new)]
    second = body_of(prompt, NUM_ANSWERED)
    return Talk(first, first_right, second, await client.plain(program, second)).again()


async def begin_talk(client: Client, holder: Program, talk: Talk) -> None:
    """Have ``holder`` answer the first turn by itself: it retains prompt and answer."""
    answer = await client.post(holder, talk.first)
    assert answer.token_ids == talk.first_right


@dataclass(slots=True)
class Turn:
    """One turn's two legs. ``history`` is what prefill is told of the holder."""

    client: Client
    prefill: Program
    decode: Program
    body: Json
    history: Json | None
    mode: str = "pull"
    retention_s: float | None = None
    bound_s: float = BOUND_S
    transfer_id: str = field(default_factory=new_transfer)

    def begin_prefill(self) -> asyncio.Task[Answer]:
        """Send prefill's leg, which is never streamed and has no options of a stream."""
        ask: Json = {"transfer_id": self.transfer_id, "role": "prefill", "mode": self.mode}
        if self.history is not None:
            ask["history"] = self.history
        body = {name: value for name, value in self.body.items() if name != "stream_options"}
        return self._begin(self.prefill, body | {"stream": False}, ask)

    async def begin_decode(self, prefill: Answer | None) -> asyncio.Task[Answer]:
        """Send decode's leg: a pull after prefill's answer, a push whenever."""
        if prefill is not None:
            assert prefill.status == 200, prefill.json
            ask = dict(prefill.offered)
        else:
            peer = await peer_of(self.client, self.prefill)
            ask = {"transfer_id": self.transfer_id, "role": "decode", "mode": "push", "peer": peer}
        if self.retention_s is not None:
            ask["retention_s"] = self.retention_s
        return self._begin(self.decode, self.body, ask)

    async def run(self) -> Answer:
        """Send both legs; return decode's answer."""
        if self.mode == "pull":
            return await (await self.begin_decode(await self.begin_prefill()))
        decode = await self.begin_decode(None)
        prefill = await self.begin_prefill()
        assert prefill.status == 200, prefill.json
        return await decode

    def _begin(self, program: Program, body: Json, ask: Json) -> asyncio.Task[Answer]:
        body = body | {"kv_transfer_params": ask}
        return asyncio.create_task(self.client.post(program, body, bound_s=self.bound_s))


async def second_turn(
    client: Client, prefill: Program, holder: Program, talk: Talk, mode: str = "pull"
) -> Turn:
    """The turn after ``begin_talk``, decoded by who holds the history."""
    history = await peer_of(client, holder)
    return Turn(client, prefill, holder, talk.second, history, mode, bound_s=2 * BOUND_S)


def prefill_report(answer: Answer) -> Json:
    """What prefill says of its part, in either leg's answer; of a push, if decode needed it."""
    report = answer.report["prefill"] or {}
    return {"read_back_outcome": "", "num_read_back_tokens": 0, "num_cached_tokens": 0, **report}


def read_back(answer: Answer) -> tuple[str, int]:
    """How a read-back ended, empty if none was tried, and how many tokens came."""
    report = prefill_report(answer)
    return report["read_back_outcome"], report["num_read_back_tokens"]


async def num_read_backs(client: Client, reader: Program, outcome: str) -> float:
    return await client.metric(reader, "kvferry_receives_total", mode="history", outcome=outcome)


async def num_leases(client: Client, holder: Program, outcome: str) -> float:
    return await client.metric(holder, "kvferry_history_leases_total", outcome=outcome)


async def begin_reading(turn: Turn) -> asyncio.Task[Answer]:
    """Begin prefill's leg; return it as soon as it READs the history."""
    since = turn.prefill.log_size()
    leg = turn.begin_prefill()
    await turn.prefill.wait_log("reading .* of history-", since)
    return leg


async def begin_asking(turn: Turn) -> asyncio.Task[Answer]:
    """Begin prefill's leg; return it once it waits for a holder that does not answer."""
    leg = turn.begin_prefill()
    await turn.client.wait_figure(turn.prefill, "num_receives", 1)
    return leg


async def reset_prefix_cache(client: Client, program: Program) -> None:
    async with (
        asyncio.timeout(BOUND_S),
        client.session.post(program.url + "/reset_prefix_cache") as response,
    ):
        assert response.status == 200


async def fill(client: Client, program: Program, num_prompts: int, num_tokens: int) -> None:
    """Have other prompts, which nobody continues, go through ``program``'s pool."""
    for _ in range(num_prompts):
        answer = await client.prefill(program, salted(body_of(fresh_prompt(num_tokens), 1)))
        assert answer.status == 200
        await client.withdraw(program, answer.offered)


def run_all(turns: Sequence[Turn]) -> asyncio.Future[list[Answer]]:
    return asyncio.gather(*(turn.run() for turn in turns))


def restart_in_place(program: Program) -> None:
    """Kill ``program`` and start it with the same addresses; only its epoch is another."""
    if "--control-port" not in program.arguments:
        port = program.control_address.rpartition(":")[2]
        program.arguments = (*program.arguments, "--control-port", port)
    program.kill()
    program.restore()
