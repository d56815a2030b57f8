"""LoRA on real vLLM: KV of one adapter is never another's, whatever their names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process_forks import ProcessForks
from tests.vllm.adapters import ADAPTER, AdapterQuestion, make_base_model, question, write_adapter
from tests.vllm.asking import (
    Client,
    Json,
    decode_params,
    hint,
    new_transfer_id,
    num_read_back,
)
from tests.vllm.conftest import CHUNKS, TEST_CONFIG, Pair
from tests.vllm.serving import VllmServer, running, start

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
_NUM_TOKENS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def lora_pair(vllm_forks: ProcessForks, folder: Path) -> Iterator[Pair]:
    """Adapter "a" with other weights on prefill than on decode; "same" with the same on both."""
    model = make_base_model(folder / "model")
    write_adapter(folder / "prefill-a", 1)
    write_adapter(folder / "decode-a", 2)
    for name in ("prefill", "decode"):
        write_adapter(folder / f"{name}-same", 3)
    prefill, decode = (
        start(
            vllm_forks, name, model, folder, *CHUNKS, *_LORA, "--lora-modules",
            f"{ADAPTER}={folder / name}-a", f"same={folder / name}-same",
            core=core, extra_config=TEST_CONFIG,
        )
        for core, name in enumerate(("prefill", "decode"))
    )  # fmt: skip
    with running(prefill, decode):
        yield prefill, decode


@pytest.fixture
def prefill(lora_pair: Pair) -> VllmServer:
    return lora_pair[0]


@pytest.fixture
def decode(lora_pair: Pair) -> VllmServer:
    return lora_pair[1]


async def _handed_over(
    client: Client, pair: Pair, asked: AdapterQuestion, mode: str, model: str = ADAPTER
) -> list[int]:
    """Return decode's tokens of both legs."""
    prefill, decode = pair
    transfer_id = new_transfer_id()
    leg: Json = {"transfer_id": transfer_id, "role": "prefill", "mode": mode}
    prefill_leg = client.complete(prefill.url, asked, model=model, kv_transfer_params=leg)
    if mode == "pull":
        offered = (await prefill_leg)["kv_transfer_params"]
        return await client.tokens(decode.url, asked, model=model, kv_transfer_params=offered)
    params = decode_params(transfer_id, prefill.peer(), "push")
    tokens, _ = await asyncio.gather(
        client.tokens(decode.url, asked, model=model, kv_transfer_params=params), prefill_leg
    )
    return tokens


def _received(decode: VllmServer) -> float:
    return decode.figure("kvferry_receives_total", outcome="received")


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_an_adapter_of_one_name_and_other_weights_gives_decodes_own_tokens(
    lora_pair: Pair, client: Client, mode: str
) -> None:
    prefill, decode = lora_pair
    asked = question(_NUM_TOKENS, 1)
    expected = await client.tokens(decode.url, asked.again())
    assert await client.tokens(prefill.url, asked.again()) != expected, "they differ"
    before = _received(decode)
    assert await _handed_over(client, lora_pair, asked.again(), mode) == expected
    assert _received(decode) == before


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_the_same_weights_in_other_folders_are_one_adapter(
    lora_pair: Pair, client: Client, mode: str
) -> None:
    _, decode = lora_pair
    asked = question(_NUM_TOKENS, 2)
    expected = await client.tokens(decode.url, asked.again(), model="same")
    assert expected != await client.tokens(decode.url, asked.again(), model="m")
    before = _received(decode)
    assert await _handed_over(client, lora_pair, asked.again(), mode, "same") == expected
    assert _received(decode) == before + 1


async def _load(client: Client, server: VllmServer, path: Path, *, in_place: bool) -> None:
    await client.load_adapter(server.url, "moving", path, in_place=in_place)


async def test_after_a_reload_in_place_the_old_adapters_kv_goes_nowhere(
    lora_pair: Pair, client: Client, folder: Path
) -> None:
    prefill, decode = lora_pair
    paths = [write_adapter(folder / f"moving-{server.name}", 5) for server in lora_pair]
    for server, path in zip(lora_pair, paths, strict=True):
        await _load(client, server, path, in_place=False)
    asked = question(_NUM_TOKENS, 3)
    first = await client.tokens(decode.url, asked, model="moving")
    following = asked.continued(first, 100, 4)
    for server, path in zip(lora_pair, paths, strict=True):
        write_adapter(path, 6)
        await _load(client, server, path, in_place=True)
    # What vLLM itself still has of the old adapter is not read back, nor handed over.
    expected = await client.tokens(prefill.url, following.again(), model="moving")
    offered = await client.complete(
        prefill.url,
        following,
        model="moving",
        kv_transfer_params={
            "transfer_id": new_transfer_id(), "role": "prefill", "history": hint(decode.peer()),
        },
    )  # fmt: skip
    assert offered["kv_transfer_params"] is None or not num_read_back(offered["kv_transfer_params"])
    before = _received(decode)
    again = following.again()
    assert await _handed_over(client, lora_pair, again, "pull", "moving") == expected
    assert _received(decode) == before
    # With both caches reset nothing old is left, and the new adapter's KV is exchanged.
    for server in lora_pair:
        await client.reset_at_last(server.url)
    again = following.again()
    assert await _handed_over(client, lora_pair, again, "pull", "moving") == expected
    assert _received(decode) == before + 1
