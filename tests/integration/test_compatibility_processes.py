"""Real instances whose chat templates differ: refused at contact by name, never paired, counted."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvferry.protocol.headers import RECEIVE_HEADER
from tests.integration.deployment_client import (
    Client,
    Json,
    body_of,
    fresh_prompt,
    new_transfer,
    open_client,
    salted,
)
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.push_legs import peer_of
from tests.own_key import signed_body
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow
_CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("templates")
    other_model = folder / "model"
    shutil.copytree(tiny_model, other_model)
    template = other_model / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant: ", "bot: "))
    with open_deployment(folder, forks) as deployment:
        deployment.add_engine("prefill", other_model)
        deployment.add_engine("alike", tiny_model)
        deployment.add_engine("decode", tiny_model)
        deployment.wait_ready()
        yield deployment


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    async with open_client() as client:
        yield client
        await client.wait_whole(*deployment.instances)


async def _legs(
    client: Client, prefill: Program, decode: Program, body: Json, mode: str
) -> tuple[str, list[int]]:
    """Return how decode's receive ended, and its tokens."""
    ask = {"transfer_id": new_transfer(), "role": "prefill", "mode": mode}
    if mode == "push":
        params = {**ask, "role": "decode", "peer": await peer_of(client, prefill)}
        answer, _ = await asyncio.gather(
            client.decode(decode, body, params),
            client.post(prefill, body | {"kv_transfer_params": ask}),
        )
    else:
        offered = (await client.post(prefill, body | {"kv_transfer_params": ask})).offered
        answer = await client.decode(decode, body, offered)
        await client.withdraw(prefill, offered)
    assert answer.status == 200, answer.json
    return answer.outcome, answer.token_ids


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_another_template_is_refused_at_contact_by_name(
    client: Client, deployment: Deployment, mode: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = body_of(fresh_prompt(200))
    right = await client.plain(decode, body)
    assert await _legs(client, prefill, decode, salted(body), mode) == ("incompatible", right)
    shown = [(await client.instance(p))["compatibility"] for p in (prefill, decode)]
    digests = [each["chat_template_digest"] for each in shown]
    assert digests[0] != digests[1]
    assert shown[0]["tokenizer_digest"] == shown[1]["tokenizer_digest"]
    log = decode.log()
    for part in ("chat_template_digest differs", *(d[:12] for d in digests), "--chat-template"):
        assert part in log
    alike = deployment["alike"]
    assert await _legs(client, alike, decode, salted(body), mode) == ("received", right)


@pytest.mark.parametrize("mode", ["pull", "push", "auto"])
async def test_the_router_does_not_pair_them(
    client: Client, deployment: Deployment, mode: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    router = deployment.add_router([prefill], [decode], name=f"router-{mode}")
    chat = {
        "messages": [{"role": "user", "content": "one two three " * 20}], "temperature": 0,
        "max_tokens": 8, "return_token_ids": True,
    }  # fmt: skip
    right = (await client.post(decode, salted(chat), path=_CHAT)).token_ids
    answer = await client.post(router, salted(chat), path=_CHAT, mode=mode)
    assert (answer.status, answer.token_ids) == (200, right)
    plain = "kvferry_router_plain_decodes_total"
    assert await client.metric(router, plain, reason="incompatible") == 1
    assert await client.metric(router, "kvferry_router_incompatible_pairs") == 1
    assert "chat_template_digest" in router.log()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_prompts_that_differ_are_told_to_whoever_routes(
    client: Client, deployment: Deployment, is_stream: bool
) -> None:
    prefill, decode = deployment["alike"], deployment["decode"]
    offered = (await client.prefill(prefill, body_of(fresh_prompt(200)))).offered
    other = body_of(fresh_prompt(200), stream=is_stream) | {"kv_transfer_params": offered}
    before = (await client.instance(decode))["receives"].get("mismatch", 0)
    raw = json.dumps(other).encode()
    headers = {"Content-Type": "application/json", **signed_body(raw)}
    url = f"{decode.url}/v1/completions"
    async with client.session.post(url, data=raw, headers=headers) as response:
        content = await response.read()
        assert response.headers.get(RECEIVE_HEADER) == (None if is_stream else "mismatch")
    assert (b"\n: kv_receive=mismatch\n\ndata: [DONE]" in content) is is_stream
    assert (await client.instance(decode))["receives"]["mismatch"] == before + 1
    await client.withdraw(prefill, offered)
