"""FerryConnector beside another connector, under vLLM's MultiConnector."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.engine.bundled_model import bundled_model_dir
from tests.support.process_forks import ProcessForks
from tests.vllm.asking import (
    Client,
    Question,
    decode_params,
    hint,
    new_transfer_id,
    num_read_back,
    random_tokens,
)
from tests.vllm.conftest import TEST_CONFIG, Pair
from tests.vllm.serving import VllmServer, free_port, running, start
from tests.vllm.settling import wait_whole

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def _start(forks: ProcessForks, name: str, core: int, folder: Path) -> VllmServer:
    control_port = free_port()
    ferry = {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry.vllm_plugin",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**TEST_CONFIG, "control_port": control_port},
    }
    on_disk = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / f"{name}-kv")},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ferry, on_disk]},
    }
    arguments = (
        "--disable-hybrid-kv-cache-manager", "--kv-transfer-config", json.dumps(both),
        # The other one writes no prompt that is computed in several chunks.
        "--max-num-batched-tokens", "4096",
    )  # fmt: skip
    server = start(forks, name, bundled_model_dir(), folder, *arguments, core=core)
    server.control_port = control_port
    return server


@pytest.fixture(scope="module")
def multi_pair(
    vllm_forks: ProcessForks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("multi")
    started = (_start(vllm_forks, n, core, folder) for core, n in enumerate(("P", "D")))
    with running(*started) as servers:
        prefill, decode = servers
        yield prefill, decode


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_prompt_is_handed_over_and_the_next_turn_read_back(
    multi_pair: Pair, client: Client, mode: str
) -> None:
    prefill, decode = multi_pair
    question = Question(random_tokens(700, 900 + len(mode)))
    expected = await client.tokens(prefill.url, question.again())
    if mode == "pull":
        offered = await client.prefill(prefill.url, question)
        answer = await client.tokens(decode.url, question, kv_transfer_params=offered)
    else:
        transfer_id = new_transfer_id()
        params = decode_params(transfer_id, prefill.peer(), mode)
        answer, _ = await asyncio.gather(
            client.tokens(decode.url, question, kv_transfer_params=params),
            client.prefill(prefill.url, question, transfer_id, mode=mode),
        )
    assert answer == expected
    assert decode.figure("kvferry_receives_total", mode=mode, outcome="received") == 1
    following = question.continued(answer, 100, 910 + len(mode))
    await client.reset_at_last(prefill.url)
    offered = await client.prefill(prefill.url, following, history=hint(decode.peer()))
    assert num_read_back(offered) == len(question.tokens) + len(answer) - 1
    expected = await client.tokens(prefill.url, following.again())
    assert await client.tokens(decode.url, following, kv_transfer_params=offered) == expected
    await client.reset_at_last(prefill.url)
    await client.reset_at_last(decode.url)
    await wait_whole(client, *multi_pair)
