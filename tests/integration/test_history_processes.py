"""Conversations between real processes: prefill reads back what decode holds, and all is exact."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    Client,
    Json,
    body_of,
    fresh_prompt,
    open_client,
    salted,
)
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.history_legs import (
    BLOCK_TOKENS,
    Talk,
    Turn,
    begin_talk,
    known_talk,
    num_leases,
    num_read_backs,
    prefill_report,
    read_back,
    reset_prefix_cache,
    run_all,
)
from tests.integration.push_legs import peer_of
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

MODES = ("pull", "push")
OPTIONS = ("--num-blocks", "2000", "--max-held-share", "1")
PREFILLS = {"prefill": ("--enable-dev-endpoints",), "uncached": ("--no-prefix-caching",)}


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("history"), forks) as deployment:
        for name, options in PREFILLS.items():
            deployment.add_engine(name, tiny_model, "--transport", "nixl", *OPTIONS, *options)
        deployment.add_engine("decode", tiny_model, "--transport", "nixl", *OPTIONS)
        deployment.wait_ready()
        yield deployment


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    """A client; prefill knows no earlier prompt, and afterwards everything is whole."""
    async with open_client() as client:
        await reset_prefix_cache(client, deployment["prefill"])
        yield client
        await client.wait_whole(*deployment.instances)


@pytest.fixture
def plain(deployment: Deployment) -> Program:
    """It shares nothing and keeps nothing, so that what is retained elsewhere stays as it is."""
    return deployment["uncached"]


@pytest.fixture
async def history(client: Client, deployment: Deployment) -> Json:
    return await peer_of(client, deployment["decode"])


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(PREFILLS))
async def test_a_conversation_goes_on(
    client: Client,
    deployment: Deployment,
    plain: Program,
    history: Json,
    name: str,
    mode: str,
    *,
    streams: bool,
) -> None:
    """Its cache lost between the turns, or never kept, prefill computes only what is new."""
    prefill, decode = deployment[name], deployment["decode"]
    body = salted(body_of(fresh_prompt(150), 21, stream=streams))
    shown_before = (await client.instance(prefill))["read_back"]
    num_read, num_leased = (
        await num_read_backs(client, prefill, "received"),
        await num_leases(client, decode, "read"),
    )
    for num_held in (0, 170, 261):
        right = await client.plain(plain, body | {"stream": False})
        answer = await Turn(client, prefill, decode, body, history, mode).run()
        assert answer.token_ids == right
        assert answer.is_done is streams
        assert read_back(answer) == (("received", num_held) if num_held else ("gone", 0))
        num_computed = len(body["prompt"]) - num_held
        assert prefill_report(answer)["num_computed_tokens"] == num_computed
        num_cached = num_held // BLOCK_TOKENS * BLOCK_TOKENS
        assert answer.report["num_cached_tokens"] == num_cached, "decode's own history stays put"
        assert answer.outcome == "received"
        body = body | {"prompt": [*body["prompt"], *right, *fresh_prompt(70)]}
        if name == "prefill":
            await reset_prefix_cache(client, prefill)
    assert await num_read_backs(client, prefill, "received") == num_read + 2
    shown = (await client.instance(prefill))["read_back"]
    assert shown["num_tokens"] == shown_before["num_tokens"] + 170 + 261
    assert shown["num_bytes"] > shown_before["num_bytes"]
    assert shown["outcomes"]["received"] == num_read + 2
    assert shown["recomputed_tokens"]["gone"] > shown_before["recomputed_tokens"].get("gone", 0)
    assert await num_leases(client, decode, "read") == num_leased + 2


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_cached", [False, True])
async def test_usage_counts_what_prefill_has_not_computed(
    client: Client,
    deployment: Deployment,
    plain: Program,
    history: Json,
    is_cached: bool,
    mode: str,
    *,
    streams: bool,
) -> None:
    """From its own cache or read back, with no report asked for; never what decode holds."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    talk = await known_talk(client, plain, 150, 70)
    await begin_talk(client, decode, talk)
    if is_cached:
        await client.post(prefill, talk.first)
    options: Json = {"stream": streams, "stream_options": {"include_usage": True}}
    body = talk.second | {"kv_report": False} | (options if streams else {})
    num_cached = talk.num_held_tokens // BLOCK_TOKENS * BLOCK_TOKENS if is_cached else 0
    for told, num_reused in ((None, num_cached), (history, talk.num_held_tokens)):
        if told is not None:
            await reset_prefix_cache(client, prefill)
            body = body | {"prompt": [*talk.first["prompt"], *talk.first_right, *fresh_prompt(70)]}
        answer = await Turn(client, prefill, decode, body, told, mode).run()
        assert not answer.report
        usage = (answer.events[-1] if streams else answer.json)["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": num_reused}


@pytest.mark.parametrize("num_cached", [0, 32])
@pytest.mark.parametrize("num_missing", [63, 64, 65, 66])
async def test_the_threshold_counts_what_can_be_moved(
    client: Client,
    deployment: Deployment,
    plain: Program,
    history: Json,
    num_missing: int,
    num_cached: int,
) -> None:
    """Whole blocks that prefill lacks; the last token is computed in any case."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = salted(body_of(fresh_prompt(num_cached + num_missing)))
    right = await client.plain(plain, body)
    assert (await client.post(decode, body)).token_ids == right
    if num_cached:
        await client.post(prefill, body | {"prompt": body["prompt"][:num_cached]})
    answer = await Turn(client, prefill, decode, body, history).run()
    assert answer.token_ids == right
    assert read_back(answer) == (("received", 64) if num_missing > 64 else ("", 0))
    report = prefill_report(answer)
    assert report["num_cached_tokens"] == num_cached
    assert report["num_computed_tokens"] == (num_missing - 64 if num_missing > 64 else num_missing)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_more", [0, 1, 7, 15])
async def test_a_history_that_ends_in_a_partial_block(
    client: Client, deployment: Deployment, plain: Program, history: Json, mode: str, num_more: int
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    talk = await known_talk(client, plain, 7 * BLOCK_TOKENS - 5 + num_more, 70)
    assert talk.num_held_tokens == 7 * BLOCK_TOKENS + num_more
    await begin_talk(client, decode, talk)
    answer = await Turn(client, prefill, decode, talk.second, history, mode).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("received", talk.num_held_tokens)


@pytest.mark.parametrize("mode", MODES)
async def test_a_turn_sent_twice_and_its_forks_at_once(
    client: Client, deployment: Deployment, plain: Program, history: Json, mode: str
) -> None:
    decode = deployment["decode"]
    talk = await known_talk(client, plain, 150, 70)
    await begin_talk(client, decode, talk)
    told = [*talk.first["prompt"], *talk.first_right]
    forks = [talk.second | {"prompt": [*told, *fresh_prompt(70)]} for _ in range(3)]
    rights = [await client.plain(plain, fork) for fork in forks]
    bodies = [*forks, talk.second, talk.second]
    turns = [
        Turn(client, deployment[name], decode, body, history, mode)
        for body in bodies
        for name in PREFILLS
    ]
    answers = await run_all(turns)
    wanted = [right for right in [*rights, talk.second_right, talk.second_right] for _ in PREFILLS]
    assert [answer.token_ids for answer in answers] == wanted
    outcomes = [read_back(answer)[0] for answer in answers]
    # Of a push, an earlier one may have left little for decode, or prefill, to lack.
    assert outcomes.count("received") >= (len(bodies) if mode == "pull" else 1), outcomes
    assert set(outcomes) <= {"received", "gone", ""}, outcomes


@pytest.mark.parametrize("mode", MODES)
async def test_another_tenants_history_is_not_found(
    client: Client, deployment: Deployment, plain: Program, history: Json, mode: str
) -> None:
    decode = deployment["decode"]
    talk = await known_talk(client, plain, 150, 70)
    await begin_talk(client, decode, talk)
    other: Talk = talk.again()
    turn = Turn(client, deployment["prefill"], decode, other.second, history, mode)
    answer = await turn.run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("gone", 0)
    assert answer.report["num_cached_tokens"] == 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_turn_that_ends_its_conversation(
    client: Client, deployment: Deployment, plain: Program, history: Json, mode: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    talk = await known_talk(client, plain, 150, 70)
    before = (await client.instance(decode))["retained"]
    await begin_talk(client, decode, talk)
    held = (await client.instance(decode))["retained"]
    assert held["num_conversations"] == before["num_conversations"] + 1
    assert held["num_blocks"] == before["num_blocks"] + talk.num_held_blocks
    turn = Turn(client, prefill, decode, talk.second, history, mode, retention_s=0)
    answer = await turn.run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("received", talk.num_held_tokens)
    after = (await client.instance(decode))["retained"]
    assert after["ends"]["ended"] == held["ends"]["ended"] + 1
    for figure in ("num_conversations", "num_blocks"):
        assert after[figure] == before[figure]
