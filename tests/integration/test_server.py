"""Real instances as processes, on a tiny random model: what a client of theirs sees."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.own_key import signed, signed_body
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

READY_S = 90.0
SETTLE_S = 15.0
MAX_MODEL_LEN = 512
NUM_BLOCKS = 64


@dataclass(slots=True)
class Process:
    """One ``kvferry engine serve``."""

    process: subprocess.Popen[bytes]
    ready_path: Path
    log_path: Path
    url: str = ""

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while not self.ready_path.exists():
            assert self.process.poll() is None, self.log_path.read_text()
            assert time.monotonic() < deadline_s, self.log_path.read_text()
            time.sleep(0.05)
        report = json.loads(self.ready_path.read_text())
        assert report["pid"] == self.process.pid
        self.url = report["url"]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()


def start(folder: Path, model: Path, name: str, *options: str) -> Process:
    ready, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, "-m", "kvferry.cli.main", "engine", "serve", str(model)]
    command += ["--ready-file", str(ready), "--instance-id", name, "--served-model-name", "tiny"]
    command += ["--num-blocks", str(NUM_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--threads", "1", "--transport", "shm", "--dtype", "float32"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, *options],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return Process(process, ready, log)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of a prefill and a decode instance; both end cleanly."""
    folder = tmp_path_factory.mktemp("pair")
    processes = [start(folder, model, name) for name in ("prefill-0", "decode-0")]
    try:
        for process in processes:
            process.wait_ready()
        yield processes[0].url, processes[1].url
    finally:
        codes = [process.end() for process in processes]
    assert codes == [0, 0], [process.log_path.read_text() for process in processes]


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def post(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    raw = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **signed_body(raw)}
    async with client.post(f"{url}/v1/completions", data=raw, headers=headers) as response:
        return response.status, await response.json()


async def instance(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with client.get(f"{url}/kvferry/instance") as response:
        shown: dict[str, Any] = await response.json()
        return shown


async def wait_idle(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return once every block is free and nothing runs or is held."""
    async with asyncio.timeout(SETTLE_S):
        while True:
            shown = await instance(client, url)
            busy = shown["num_requests_running"] + shown["num_requests_waiting"]
            exchange = shown["exchange"]
            held = exchange["num_handoffs_held"] + exchange["num_receives"]
            if shown["num_free_blocks"] == NUM_BLOCKS and busy == held == 0:
                return shown
            await asyncio.sleep(0.02)


def prompt_of(num_tokens: int, start: int) -> list[int]:
    return [3 + (start + position * 31) % 250 for position in range(num_tokens)]


def reference_tokens(model: Path, prompt: list[int], count: int) -> list[int]:
    import torch
    from transformers import LlamaForCausalLM

    module = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor([prompt])
    output = module.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


async def test_greedy_tokens_are_those_of_the_plain_model(
    pair: tuple[str, str], client: aiohttp.ClientSession, model: Path
) -> None:
    prompt = prompt_of(70, 1)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    status, answer = await post(client, pair[0], body | {"return_token_ids": True})
    assert status == 200
    assert answer["choices"][0]["token_ids"] == reference_tokens(model, prompt, 12)
    assert answer["usage"]["prompt_tokens"] == 70


async def test_a_stream_says_what_the_whole_answer_says(
    pair: tuple[str, str], client: aiohttp.ClientSession
) -> None:
    body = {"prompt": "some text", "seed": 5, "max_tokens": 40, "ignore_eos": True}
    _, whole = await post(client, pair[0], body)
    async with client.post(f"{pair[0]}/v1/completions", json=body | {"stream": True}) as response:
        events = (await response.read()).split(b"\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"]
    assert len(chunks) == 40


async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    pair: tuple[str, str], client: aiohttp.ClientSession
) -> None:
    status, answer = await post(client, pair[0], {"prompt": prompt_of(600, 2)})
    assert status == 400
    assert "600" in answer["error"]["message"]
    assert str(MAX_MODEL_LEN) in answer["error"]["message"]


async def test_a_handoff_gives_the_tokens_of_one_instance(
    pair: tuple[str, str], client: aiohttp.ClientSession, model: Path
) -> None:
    prompt = prompt_of(200, 3)
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_report": True,
    }
    ask = {"transfer_id": "xfer-server-1", "role": "prefill"}
    _, first = await post(client, pair[0], body | {"kv_transfer_params": ask})
    offered = first["kv_transfer_params"]
    assert first["choices"][0]["token_ids"] == [offered["first_token"]["token_id"]]
    status, answer = await post(client, pair[1], body | {"kv_transfer_params": offered})
    assert status == 200
    assert answer["choices"][0]["token_ids"] == reference_tokens(model, prompt, 12)
    assert answer["kv_report"]["receive_outcome"] == "received"
    assert answer["kv_report"]["num_received_tokens"] == 200
    for url in pair:
        await wait_idle(client, url)


async def test_a_client_that_leaves_frees_everything(
    pair: tuple[str, str], client: aiohttp.ClientSession
) -> None:
    body = {"prompt": prompt_of(40, 4), "max_tokens": 400, "ignore_eos": True, "stream": True}
    response = await client.post(f"{pair[1]}/v1/completions", json=body)
    await response.content.readuntil(b"\n\n")
    assert (await instance(client, pair[1]))["num_free_blocks"] < NUM_BLOCKS
    response.close()
    await wait_idle(client, pair[1])


async def test_an_offer_is_given_up_on_request(
    pair: tuple[str, str], client: aiohttp.ClientSession
) -> None:
    ask = {"transfer_id": "xfer-server-2", "role": "prefill"}
    body = {"prompt": prompt_of(100, 5), "kv_transfer_params": ask}
    await post(client, pair[0], body)
    assert (await instance(client, pair[0]))["exchange"]["num_handoffs_held"] == 1
    url = f"{pair[0]}/kvferry/transfers/xfer-server-2"
    async with client.delete(url) as response:
        assert response.status == 403
        assert "uid" in (await response.json())["error"]["message"]
    assert (await instance(client, pair[0]))["exchange"]["num_handoffs_held"] == 1
    async with client.delete(url, headers=signed(b"", "xfer-server-2")) as response:
        assert response.status == 204
    await wait_idle(client, pair[0])


async def test_sigterm_ends_a_running_stream_and_the_process(
    model: Path, tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    process = start(tmp_path, model, "short-lived", "--shutdown-timeout-s", "5")
    try:
        await asyncio.to_thread(process.wait_ready)
        body = {"prompt": prompt_of(40, 6), "max_tokens": 450, "ignore_eos": True, "stream": True}
        async with client.post(f"{process.url}/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            process.process.send_signal(signal.SIGTERM)
            rest = await response.content.read()
        assert b'"code":"shutting_down"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await asyncio.to_thread(process.process.wait, 10) == 0
    finally:
        process.process.kill()
        process.process.wait()


async def test_a_refused_start_is_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, tmp_path, "refused")
    assert await asyncio.to_thread(process.process.wait, READY_S) == 1
    lines = process.log_path.read_text().splitlines()
    assert len(lines) == 1
    assert "config.json" in lines[0]
