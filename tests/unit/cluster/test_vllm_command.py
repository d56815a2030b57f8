"""What an instance of vLLM is started with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kvferry.cluster.vllm_process import VllmInstance, vllm_command, vllm_environment

_INSTANCE = VllmInstance(
    python=Path("/environment/bin/python"),
    model="/model",
    port=8001,
    side_channel_port=5601,
    core=1,
    transfer_config={"kv_connector": "FerryConnector"},
    arguments=("--max-num-batched-tokens", "512"),
)


def test_the_command_names_port_arguments_and_connector() -> None:
    command = vllm_command(_INSTANCE)
    assert command[:3] == ["/environment/bin/vllm", "serve", "/model"]
    assert command[command.index("--port") + 1] == "8001"
    assert command[command.index("--max-num-batched-tokens") + 1] == "512"
    config = command[command.index("--kv-transfer-config") + 1]
    assert json.loads(config) == {"kv_connector": "FerryConnector"}
    assert "--kv-transfer-config" not in vllm_command(replace(_INSTANCE, transfer_config=None))


def test_the_environment_has_core_and_side_channel_and_keeps_the_rest() -> None:
    environment = vllm_environment({"HOME": "/home"}, _INSTANCE)
    assert environment["HOME"] == "/home"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"


def test_waiting_quietly_is_a_folder_on_the_path_that_can_be_left_out() -> None:
    folder = vllm_environment({}, _INSTANCE)["PYTHONPATH"]
    assert (Path(folder) / "sitecustomize.py").is_file()
    assert "PYTHONPATH" not in vllm_environment({}, replace(_INSTANCE, waits_quietly=False))
