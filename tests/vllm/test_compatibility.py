"""Real vLLMs that differ beyond the layout: refused by name, or not at all where KV is the same."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process_forks import ProcessForks
from tests.vllm.adapters import make_base_model, tiny_question
from tests.vllm.asking import Client, ask_instance
from tests.vllm.conftest import CHUNKS, TEST_CONFIG
from tests.vllm.serving import VllmServer, running, start

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_NUM_TOKENS = 300
FP8 = ("--kv-cache-dtype", "fp8_e4m3")


class World:
    """One prefill instance at a time, and decode instances beside it that come and go."""

    def __init__(self, forks: ProcessForks, model: Path, folder: Path) -> None:
        self.forks = forks
        self.model = model
        self.folder = folder

    @contextlib.contextmanager
    def pair(
        self, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()
    ) -> Iterator[tuple[VllmServer, VllmServer]]:
        first, second = (
            start(self.forks, name, self.model, self.folder, *CHUNKS, *arguments,
                  core=core, extra_config=TEST_CONFIG)
            for core, (name, arguments) in enumerate((("prefill", prefill), ("decode", decode)))
        )  # fmt: skip
        with running(first, second):
            yield first, second


@pytest.fixture
def world(vllm_forks: ProcessForks, tmp_path: Path) -> World:
    return World(vllm_forks, make_base_model(tmp_path / "model"), tmp_path)


async def _outcome(client: Client, prefill: VllmServer, decode: VllmServer) -> str:
    """Hand over by pull, and return how it ended; decode's tokens are its own in any case."""
    asked = tiny_question(_NUM_TOKENS, 1)
    expected = await client.tokens(decode.url, asked.again())
    asked = asked.again()
    offered = await client.prefill(prefill.url, asked)
    assert await client.tokens(decode.url, asked, kv_transfer_params=offered) == expected
    (outcome,) = ask_instance(decode.control_port).receives
    return outcome


async def test_a_longest_sequence_of_its_own_does_not_matter(world: World, client: Client) -> None:
    with world.pair(decode=("--max-model-len", "2048")) as (prefill, decode):
        told = [ask_instance(server.control_port).compatibility for server in (prefill, decode)]
        for each, length in zip(told, (4096, 2048), strict=True):
            assert each is not None
            assert (each.attention_backend, each.kv_cache_layout) == ("CPU_ATTN", "LBHNC")
            assert (each.kv_cache_dtype, each.rope_max_model_len) == ("float32", 0)
            assert each.instruction_set
            assert each.kv_tensors_digest
            assert each.tokenizer_digest
            assert each.chat_template_digest
            assert each.max_model_len == length
        assert await _outcome(client, prefill, decode) == "received"


async def test_another_template_beside_the_tokenizer_is_refused_by_name(
    world: World, client: Client
) -> None:
    tokenizer = world.folder / "tokenizer"
    shutil.copytree(world.model, tokenizer)
    (tokenizer / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with world.pair(decode=("--tokenizer", str(tokenizer))) as (prefill, decode):
        assert await _outcome(client, prefill, decode) == "incompatible"
        assert "chat_template_digest differs" in decode.log()
        assert "--chat-template" in decode.log()


@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's 8-bit KV needs AVX-512"
)
async def test_another_kind_of_eight_bits_is_refused_by_name(world: World, client: Client) -> None:
    with world.pair(FP8, ("--kv-cache-dtype", "fp8_e5m2")) as (prefill, decode):
        assert await _outcome(client, prefill, decode) == "incompatible"
        for part in ("kv_cache_dtype differs", "fp8_e4m3", "fp8_e5m2", "--kv-cache-dtype"):
            assert part in decode.log()
