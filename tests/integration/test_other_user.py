"""Another user of the same host gets nothing of an instance, and is told what it lacks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.client.control_answer import ControlEnd
from kvferry.protocol.keys import FOLDER_VARIABLE, user_key_path
from kvferry.vllm_plugin.orders import Answer
from kvferry.vllm_plugin.worker_link import OrderServer
from tests.integration.another_user import UID
from tests.integration.deployment_client import Client, body_of, fresh_prompt, new_transfer
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.support.process_forks import ProcessForks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into: nothing but their modes protects what is in it."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def own_environment(open_folder: Path) -> dict[str, str]:
    return {FOLDER_VARIABLE: str(open_folder / "state")}


@pytest.fixture(scope="module")
def deployment(
    own_environment: dict[str, str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """An instance with its user's key, and one without."""
    forks = ProcessForks(own_environment)
    with open_deployment(tmp_path_factory.mktemp("other-user"), forks) as deployment:
        options = ("--transport", "shm", "--num-blocks", "64")
        deployment.add_engine("safe", tiny_model, *options)
        deployment.add_engine("open", tiny_model, *options, "--no-user-key")
        deployment.add_engine("nixl", tiny_model, "--transport", "nixl", "--num-blocks", "64")
        deployment.wait_ready()
        yield deployment
    forks.close()


@pytest.fixture
def others_folder(open_folder: Path) -> Iterator[Path]:
    """A folder of the other user's."""
    folder = open_folder / "other"
    folder.mkdir(mode=0o700)
    os.chown(folder, UID, UID)
    yield folder
    shutil.rmtree(folder)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.integration.another_user", *arguments]


async def tried(program: Program, own_environment: dict[str, str], others_folder: Path) -> Any:  # noqa: ANN401
    transfer_id = new_transfer()
    params = {"transfer_id": transfer_id, "role": "prefill"}
    told = {
        "url": program.url,
        "control_address": program.control_address,
        "pid": program.pid,
        "key_file": str(user_key_path(own_environment)),
        "own_state": str(others_folder),
        "transfer_id": transfer_id,
        "leg": body_of(fresh_prompt(100)) | {"kv_transfer_params": params},
    }
    process = await asyncio.create_subprocess_exec(
        *command("attempts", json.dumps(told)), cwd=ROOT, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(LIMIT_S):
        output, _ = await process.communicate()
    assert process.returncode == 0
    shown = json.loads(output)
    assert shown["uid"] == UID
    return shown


async def test_it_gets_nothing(
    deployment: Deployment,
    client: Client,
    own_environment: dict[str, str],
    others_folder: Path,
) -> None:
    safe = deployment["safe"]
    shown = await tried(safe, own_environment, others_folder)
    assert (shown["key"], shown["folder"]) == ("PermissionError", "PermissionError")
    assert shown["without a key"] == ControlEnd.KEY_WANTED
    assert shown["with its own key"] == ControlEnd.KEY_REFUSED
    assert (shown["memory"], shown["descriptors"]) == ("PermissionError", 0)
    status, answer = shown["leg"]
    assert status == 200
    assert "kv_transfer_params" not in answer
    assert shown["delete"][0] == 403
    assert "uid 0" in shown["delete"][1]["error"]["message"]
    assert await client.metric(safe, "kvferry_unsigned_params_total") == 2
    assert (await client.instance(safe))["exchange"]["num_handoffs_held"] == 0


async def test_without_a_key_it_gets_in(
    deployment: Deployment,
    client: Client,
    own_environment: dict[str, str],
    others_folder: Path,
) -> None:
    """What the key is for: the same attempts, where there is none."""
    shown = await tried(deployment["open"], own_environment, others_folder)
    assert shown["without a key"] == ControlEnd.ANSWERED
    assert shown["leg"][1]["kv_transfer_params"]["peer"]["instance_id"] == "open"
    assert shown["delete"][0] == 204
    assert (await client.instance(deployment["open"]))["user_key"] is None


async def test_its_router_is_told_which_file_to_name(
    deployment: Deployment, own_environment: dict[str, str], others_folder: Path
) -> None:
    safe = deployment["safe"]
    async with others_router(safe, others_folder) as url:
        (found,) = (await fleet(url))["prefill"]
        assert found["identity"] is None
        key_file = user_key_path(own_environment)
        assert f"--cluster-key-file {key_file}, the key of uid 0" in found["detail"]
    copy = others_folder / "copy"
    shutil.copy(key_file, copy)
    os.chown(copy, UID, UID)
    async with others_router(safe, others_folder, "--cluster-key-file", str(copy)) as url:
        (found,) = (await fleet(url))["prefill"]
        assert found["identity"]["instance_id"] == "safe"


async def test_its_router_is_told_of_a_silent_control_port(
    deployment: Deployment, others_folder: Path
) -> None:
    """Over HTTP vLLM does not say whose key it has."""
    safe = deployment["safe"]
    control = f"{safe.url}={safe.control_address}"
    async with others_router(safe, others_folder, "--control", control) as url:
        (found,) = (await fleet(url))["prefill"]
    assert f"this router has the key of uid {UID}" in found["detail"]
    assert "--cluster-key-file a copy of the key that its log names" in found["detail"]
    assert "the key of uid 0" in safe.log()


@pytest.mark.parametrize("name", ["safe", "nixl"])
def test_no_memory_that_is_shared_is_open_to_other_users(deployment: Deployment, name: str) -> None:
    """Nor to other users of the same group."""
    pid = deployment[name].pid
    modes = {path: path.stat().st_mode & 0o777 for path in Path(f"/proc/{pid}/fd").iterdir()}
    shared = {
        target: mode
        for path, mode in modes.items()
        if (target := os.readlink(path)).startswith(("/memfd:", "/dev/shm/"))
    }
    assert shared
    assert set(shared.values()) == {0o600}
    assert {mode & 0o077 for mode in system_v_modes(pid)} <= {0}


def system_v_modes(pid: int) -> list[int]:
    """Of the segments of System V's shared memory that ``pid`` has made."""
    rows = [row.split() for row in Path("/proc/sysvipc/shm").read_text().splitlines()]
    perms, creator = rows[0].index("perms"), rows[0].index("cpid")
    return [int(row[perms], 8) & 0o777 for row in rows[1:] if int(row[creator]) == pid]


def test_the_socket_of_orders_is_closed_to_it() -> None:
    server = OrderServer(lambda order: Answer())
    try:
        assert Path(server.path).stat().st_mode & 0o777 == 0o600
        output = subprocess.run(
            command("connect", server.path), cwd=ROOT, capture_output=True, check=True, timeout=60
        ).stdout
    finally:
        server.close()
    assert json.loads(output) == "PermissionError"


@asynccontextmanager
async def others_router(program: Program, folder: Path, *options: str) -> AsyncIterator[str]:
    """A router of the other user's, at its URL."""
    ready = folder / "ready.json"
    arguments: Sequence[str] = (
        "--prefill", program.url, "--decode", program.url, "--port", "0",
        "--ready-file", str(ready), "--health-timeout-s", "1", *options,
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command("router", *arguments),
        cwd=ROOT,
        env=os.environ | {FOLDER_VARIABLE: str(folder)},
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield json.loads(ready.read_text())["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        ready.unlink(missing_ok=True)


async def fleet(url: str) -> Any:  # noqa: ANN401
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/kvferry/fleet") as response,
    ):
        return await response.json()
