"""Two tensor-parallel ranks on both sides: each moves its shard, and vLLM sees one transfer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process_forks import ProcessForks
from tests.support.tiny_model import TINY_VOCABULARY_SIZE, TinyShape, make_tiny_model
from tests.vllm.asking import (
    Client,
    Question,
    ask_instance,
    decode_params,
    hint,
    new_transfer_id,
    num_read_back,
    open_session,
)
from tests.vllm.conftest import CHUNKS, TEST_CONFIG, Answers
from tests.vllm.serving import VllmServer, running, start
from tests.vllm.settling import BOUND_S

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_NUM_RANKS = 2
_SHAPE = TinyShape(num_heads=4, num_kv_heads=2, head_size=64, hidden_size=256)
_LENGTHS = (2, 65, 128, 200, 256, 300, 511, 700, 1025, 1500)
_NUM_TURNS = 4
_BLOCK = 128


def _tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    choose = random.Random(seed)
    return tuple(choose.randrange(3, TINY_VOCABULARY_SIZE) for _ in range(num_tokens))


@pytest.fixture(scope="module")
def ranked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model has an odd number of heads, so this one is made up."""
    return make_tiny_model(tmp_path_factory.mktemp("ranked"), max_positions=4096, shape=_SHAPE)


@pytest.fixture(scope="module")
def expected(
    vllm_forks: ProcessForks,
    ranked_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Answers, Answers]:
    """Prompts, and the turns of a conversation, with what a plain server answers."""

    async def ask(server: VllmServer) -> tuple[Answers, Answers]:
        async with open_session() as session:
            client = Client(session)
            prompts = [Question(_tokens(n, seed)) for seed, n in enumerate(_LENGTHS)]
            answers = [(q, await client.tokens(server.url, q)) for q in prompts]
            turns, question = [], Question(_tokens(300, 50))
            for turn in range(_NUM_TURNS):
                answer = await client.tokens(server.url, question)
                turns.append((question, answer))
                more = (*question.tokens, *answer, *_tokens(180, 51 + turn))
                question = Question(more, question.max_tokens, question.salt)
            return answers, turns

    folder = tmp_path_factory.mktemp("ranked-plain")
    server = start(vllm_forks, "plain", ranked_model, folder, *CHUNKS, num_ranks=_NUM_RANKS)
    with running(server):
        return asyncio.run(ask(server))


@pytest.fixture(scope="module")
def ranked(
    vllm_forks: ProcessForks,
    ranked_model: Path,
    expected: tuple[Answers, Answers],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """A prefill and a decode instance, after the plain one has ended."""
    folder = tmp_path_factory.mktemp("ranked-pair")
    prefill, decode = (
        start(vllm_forks, name, ranked_model, folder, *CHUNKS, core=core, num_ranks=_NUM_RANKS,
              extra_config=TEST_CONFIG)
        for core, name in enumerate(("prefill", "decode"))
    )  # fmt: skip
    with running(prefill, decode):
        yield prefill, decode


async def _wait_whole(client: Client, *servers: VllmServer) -> None:
    """Wait until no rank holds a block any more; each request makes a step that says so."""
    for server in servers:
        deadline_s = time.monotonic() + BOUND_S
        while True:
            await client.tokens(server.url, Question(_tokens(3, 1), max_tokens=2))
            usage = server.metric("vllm:kv_cache_usage_perc")
            if usage == 0:
                break
            assert time.monotonic() < deadline_s, f"{server.name}: {usage:.3f} still in use"
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_handoffs_of_four_at_a_time_give_the_tokens_of_a_plain_server(
    ranked: tuple[VllmServer, VllmServer],
    client: Client,
    expected: tuple[Answers, Answers],
    mode: str,
) -> None:
    prefill, decode = ranked
    received = {"mode": mode, "outcome": "received"}
    num_before = decode.figure("kvferry_receives_total", **received)
    slots = asyncio.Semaphore(4)

    async def answer(question: Question) -> list[int]:
        async with slots:
            if mode == "pull":
                offered = await client.prefill(prefill.url, question)
                return await client.tokens(decode.url, question, kv_transfer_params=offered)
            transfer_id = new_transfer_id()
            params = decode_params(transfer_id, prefill.peer(), mode)
            tokens, _ = await asyncio.gather(
                client.tokens(decode.url, question, kv_transfer_params=params),
                client.prefill(prefill.url, question, transfer_id, mode=mode),
            )
            return tokens

    answers, _ = expected
    found = await asyncio.gather(*(answer(question.again()) for question, _ in answers))
    assert found == [tokens for _, tokens in answers]
    num_moved = sum(1 for length in _LENGTHS if length >= 64)
    assert decode.figure("kvferry_receives_total", **received) == num_before + num_moved


async def test_each_rank_moves_its_own_shard(
    ranked: tuple[VllmServer, VllmServer], client: Client, expected: tuple[Answers, Answers]
) -> None:
    prefill, decode = ranked
    infos = [ask_instance(decode.control_port + rank) for rank in range(_NUM_RANKS)]
    assert infos[0].instance_id == infos[1].instance_id
    assert infos[0].epoch == infos[1].epoch
    assert [info.layout.tensor_parallel_rank for info in infos] == [0, 1]
    question = expected[0][-1][0].again()
    before = decode.figure("kvferry_transfer_bytes_total", mode="pull")
    offered = await client.prefill(prefill.url, question)
    await client.tokens(decode.url, question, kv_transfer_params=offered)
    num_bytes = decode.figure("kvferry_transfer_bytes_total", mode="pull") - before
    num_blocks = -(-len(question.tokens) // _BLOCK)
    assert num_bytes == num_blocks * sum(info.layout.block_bytes for info in infos)


async def test_a_conversation_is_read_back_by_all_ranks(
    ranked: tuple[VllmServer, VllmServer], client: Client, expected: tuple[Answers, Answers]
) -> None:
    prefill, decode = ranked
    salt, num_held, read_back = new_transfer_id(), [], []
    for question, answer in expected[1]:
        await client.reset_at_last(prefill.url)
        asked = Question(question.tokens, question.max_tokens, salt)
        offered = await client.prefill(prefill.url, asked, history=hint(decode.peer()))
        assert await client.tokens(decode.url, asked, kv_transfer_params=offered) == answer
        read_back.append(num_read_back(offered))
        num_held.append(len(question.tokens) + len(answer) - 1)
    assert read_back == [0, *num_held[:-1]]


async def test_clients_that_leave_leave_nothing_on_any_rank(
    ranked: tuple[VllmServer, VllmServer], client: Client
) -> None:
    prefill, decode = ranked
    waiting = Question(_tokens(1000, 60))
    params = decode_params(new_transfer_id(), prefill.peer(), "push")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await client.tokens(decode.url, waiting, kv_transfer_params=params)
    for seed, mode in enumerate(("pull", "push")):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.prefill(prefill.url, Question(_tokens(3000, 61 + seed)), mode=mode)
    for server in ranked:
        await client.reset_at_last(server.url)
    await _wait_whole(client, *ranked)


def _worker_of(server: VllmServer, rank: int) -> int:
    title = f"Worker_TP{rank}".encode()
    (pid,) = (p for p in server.members() if title in Path(f"/proc/{p}/cmdline").read_bytes())
    return pid


def _num_received(server: VllmServer) -> float:
    return server.figure("kvferry_receives_total", outcome="received")


async def test_one_rank_that_does_not_answer_costs_a_recompute(
    ranked: tuple[VllmServer, VllmServer], client: Client, expected: tuple[Answers, Answers]
) -> None:
    prefill, decode = ranked
    question, tokens = expected[0][-1]
    fresh = question.again()
    num_received = _num_received(decode)
    num_ended = decode.figure("kvferry_receives_total")
    offered = await client.prefill(prefill.url, fresh)
    stopped = _worker_of(prefill, 1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_S):
            assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == tokens
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert _num_received(decode) == num_received
    assert decode.figure("kvferry_receives_total") == num_ended + 1
    for server in ranked:
        await client.reset_at_last(server.url)
    await _wait_whole(client, *ranked)
    again = question.again()
    offered = await client.prefill(prefill.url, again)
    assert await client.tokens(decode.url, again, kv_transfer_params=offered) == tokens


async def test_a_killed_prefill_instance_costs_a_recompute(
    ranked: tuple[VllmServer, VllmServer], client: Client, expected: tuple[Answers, Answers]
) -> None:
    prefill, decode = ranked
    question, tokens = expected[0][-2]
    fresh = question.again()
    offered = await client.prefill(prefill.url, fresh)
    prefill.kill()
    async with asyncio.timeout(BOUND_S):
        assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == tokens
    await client.reset_at_last(decode.url)
    await _wait_whole(client, decode)
    prefill.begin()
    prefill.wait_ready()
    again = question.again()
    offered = await client.prefill(prefill.url, again)
    assert await client.tokens(decode.url, again, kv_transfer_params=offered) == tokens
