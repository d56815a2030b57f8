"""``kvferry router`` as a process: ready file, signals, clear refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.support.scripted_engine import ScriptedEngine

_LIMIT_S = 15.0
_STREAM = {"prompt": "a", "stream": True}


@asynccontextmanager
async def router_process(
    ready: Path, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.cli.main", "router", "--port", "0",
        "--ready-file", str(ready), "--log-level", "error", *options,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_LIMIT_S):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.01)
        shown = json.loads(ready.read_text())
        assert shown["pid"] == process.pid
        yield process, shown["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
async def test_lets_streams_end_before_it_stops(tmp_path: Path, signal_number: int) -> None:
    gate = asyncio.Event()
    async with ScriptedEngine("p") as prefill, ScriptedEngine("d") as decode:
        decode.decode.before_event = {1: gate}
        options = ("--prefill", prefill.url, "--decode", decode.url)
        async with (
            router_process(tmp_path / "ready", *options) as (process, url),
            aiohttp.ClientSession() as client,
            client.post(f"{url}/v1/completions", json=_STREAM) as response,
        ):
            body = await response.content.readany()
            process.send_signal(signal_number)
            async with asyncio.timeout(_LIMIT_S):
                while await _accepts(url):
                    await asyncio.sleep(0.01)
            gate.set()
            body += await response.read()
            assert body.endswith(b"data: [DONE]\n\n")
            assert await asyncio.wait_for(process.wait(), _LIMIT_S) == 0


async def _accepts(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


@pytest.mark.parametrize("num_events", [0, 1])
async def test_leaving_client_ends_both_legs_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], num_events: int
) -> None:
    async with ScriptedEngine("p") as prefill, ScriptedEngine("d") as decode:
        decode.decode.before_event = {num_events: asyncio.Event()}
        options = ("--prefill", prefill.url, "--decode", decode.url)
        async with router_process(tmp_path / "ready", *options) as (_, url):
            for number in range(1, 6):
                begun = asyncio.Event()
                call = asyncio.create_task(_call_and_stay(url, begun))
                await _wait_received(decode, number)
                if num_events:
                    await begun.wait()
                call.cancel()
                async with asyncio.timeout(1.0):
                    await _wait_left(decode, number)
                await asyncio.gather(call, return_exceptions=True)
            await prefill.wait_until(lambda: len(prefill.ended) == 5)
    assert capfd.readouterr().err == ""


async def _call_and_stay(url: str, begun: asyncio.Event) -> None:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json=_STREAM) as response,
    ):
        await response.content.readany()
        begun.set()
        await asyncio.Event().wait()


async def _wait_received(engine: ScriptedEngine, count: int) -> None:
    await engine.wait_until(lambda: len(engine.received) == count)


async def _wait_left(engine: ScriptedEngine, count: int) -> None:
    await engine.wait_until(lambda: engine.num_left == count and len(engine.ended) == count)


async def test_stopped_instance_delays_a_request_no_longer_than_the_bound(tmp_path: Path) -> None:
    program = (
        "import asyncio\n"
        "from tests.support.scripted_engine import ScriptedEngine\n"
        "async def main():\n"
        "    engine = ScriptedEngine('p')\n"
        "    await engine.start()\n"
        "    print(engine.url, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert process.stdout is not None
        stopped_url = (await process.stdout.readline()).decode().strip()
        async with ScriptedEngine("q") as other, ScriptedEngine("d") as decode:
            options = (
                "--prefill", f"{stopped_url},{other.url}", "--decode", decode.url,
                "--prefill-timeout-s", "0.5", "--health-interval-s", "60",
            )  # fmt: skip
            async with (
                router_process(tmp_path / "ready", *options) as (_, url),
                aiohttp.ClientSession() as client,
            ):
                process.send_signal(signal.SIGSTOP)
                async with (
                    asyncio.timeout(5),
                    client.post(f"{url}/v1/completions", json=_STREAM) as response,
                ):
                    assert (await response.read()).endswith(b"data: [DONE]\n\n")
                assert other.roles() == ["prefill"]
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prefill", "ftp://a", "--decode", "http://b"], "not of the form"),
        (["--prefill", "http://a", "--decode", "http://u:p@b"], "no user"),
        (["--prefill", "http://a"], "--decode"),
        (["--prefill", "http://a", "--decode", "http://b", "--cluster-key-file", "/none"], "key"),
    ],
)
def test_wrong_options_are_refused_in_a_line(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", "router", "--port", "0", *options]
    environment = {key: value for key, value in os.environ.items() if key != "KVFERRY_CLUSTER_KEY"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, env=environment
    )
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
