import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvferry.blocks.retention import RetentionLimits
from kvferry.cli.engine import engine
from kvferry.errors import ConfigError
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.messages import InstanceInfo
from kvferry.server import run as server_run
from kvferry.server.config import InstanceConfig
from tests.own_key import own_key
from tests.unit.server.fakes import LAYOUT

URL = "http://127.0.0.1:1234"
INFO = InstanceInfo(
    InstanceId("a"), Epoch(1), "tcp://127.0.0.1:5", LAYOUT.fingerprint(), LAYOUT, "shm", (), 3, 3
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[InstanceConfig]:
    """What would have been started, in order; each says at once that it is ready."""
    configs: list[InstanceConfig] = []

    def run_instance(config: InstanceConfig, clock: Any, on_ready: Any) -> None:  # noqa: ANN401
        configs.append(config)
        on_ready(URL, INFO)

    monkeypatch.setattr(server_run, "run_instance", run_instance)
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)
    return configs


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(engine, ["serve", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_options_reach_each_configuration(started: list[InstanceConfig], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 32 + "\n")
    invoke(
        *("m", "--port", "8001", "--instance-id", "p0", "--served-model-name", "x"),
        *("--control-host", "0.0.0.0", "--control-port", "7", "--cluster-key-file", str(key)),
        *("--transport", "shm", "--ucx-tls", "tcp", "--dtype", "float32", "--threads", "3"),
        *("--num-blocks", "9", "--block-size", "8", "--max-model-len", "50"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--no-prefix-caching"),
        *("--recompute-threshold-tokens", "5", "--handoff-lease-s", "6", "--verify-transfers"),
        *("--receive-timeout-s", "7", "--max-held-share", "0.5", "--shutdown-timeout-s", "2"),
        *("--read-back-timeout-s", "3", "--prefill-timeout-s", "8"),
        *("--max-registered-share", "0.125", "--enable-dev-endpoints"),
        *("--retention-s", "9", "--max-retained-share", "0.25", "--retention-renew"),
    )
    (config,) = started
    assert (config.model, config.served_model_names) == ("m", ("x",))
    assert (config.transport, config.ucx_tls) == ("shm", "tcp")
    assert (config.http.port, config.http.shutdown_timeout_s) == (8001, 2.0)
    assert config.http.has_dev_endpoints
    engine_config = config.engine
    assert (engine_config.num_blocks, engine_config.block_size_tokens) == (9, 8)
    assert (engine_config.max_num_sequences, engine_config.prefill_chunk_tokens) == (4, 64)
    assert (engine_config.max_model_len, engine_config.num_threads) == (50, 3)
    assert (engine_config.dtype, engine_config.prefix_caching) == ("float32", False)
    assert engine_config.recompute_threshold_tokens == 5
    assert (engine_config.retention_s, engine_config.max_retained_share) == (9.0, 0.25)
    assert engine_config.retention_renews
    exchange = config.exchange
    assert (exchange.instance_id, exchange.control_port) == ("p0", 7)
    assert (exchange.handoff_lease_s, exchange.receive_timeout_s) == (6.0, 7.0)
    assert (exchange.max_held_share, exchange.verify_transfers) == (0.5, True)
    assert (exchange.history_timeout_s, exchange.prefill_timeout_s) == (3.0, 8.0)
    assert exchange.max_registered_share == 0.125
    assert exchange.cluster_key == b"k" * 32


def test_the_threshold_may_be_measured(started: list[InstanceConfig]) -> None:
    invoke("m", "--recompute-threshold-tokens", "auto")
    assert started[0].engine.recompute_threshold_tokens is None
    result = CliRunner().invoke(engine, ["serve", "m", "--recompute-threshold-tokens", "few"])
    assert result.exit_code == 2
    assert "neither a number of tokens nor auto" in result.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--read-back-timeout-s", "0"),
        ("--retention-s", "-1"),
        ("--max-retained-share", "50"),
        ("--max-retained-share", "0"),
    ],
)
def test_a_refusal_names_the_option_as_it_was_given(
    option: str, value: str, started: list[InstanceConfig]
) -> None:
    result = CliRunner().invoke(engine, ["serve", "m", option, value])
    assert result.exit_code == 2
    assert f"'{option}'" in result.output
    assert started == []


def test_defaults_are_for_one_host(started: list[InstanceConfig]) -> None:
    invoke("m")
    invoke("m")
    first, second = started
    assert (first.http.host, first.http.port) == ("127.0.0.1", 0)
    assert not first.http.has_dev_endpoints
    assert first.exchange.control_host == "127.0.0.1"
    assert first.engine.kv_cache_gib == 1.0
    assert first.engine.prefix_caching
    assert first.engine.retention_limits() == RetentionLimits(480.0, 0.5, renews_on_use=False)
    assert first.engine.num_threads == len(os.sched_getaffinity(0))
    assert first.exchange.instance_id != second.exchange.instance_id
    assert first.exchange.epoch != second.exchange.epoch


def test_the_cluster_key_comes_from_the_environment_too(
    started: list[InstanceConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_CLUSTER_KEY", "e" * 32)
    invoke("m", "--control-host", "0.0.0.0")
    assert started[0].exchange.cluster_key == b"e" * 32


def test_beyond_loopback_a_cluster_key_is_needed(started: list[InstanceConfig]) -> None:
    with pytest.raises(ConfigError, match="cluster key"):
        invoke("m", "--control-host", "0.0.0.0")
    assert started == []


@pytest.mark.usefixtures("started")
def test_readiness_is_printed_and_written_whole(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    output = invoke("m", "--ready-file", str(ready))
    assert output.startswith("kvferry engine ready: http://127.0.0.1:1234 ")
    assert json.loads(ready.read_text()) == {
        "url": "http://127.0.0.1:1234",
        "control_address": "tcp://127.0.0.1:5",
        "instance_id": "a",
        "pid": os.getpid(),
    }
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


def test_on_loopback_the_users_own_key_is_the_key(started: list[InstanceConfig]) -> None:
    invoke("m")
    key = own_key()
    exchange = started[0].exchange
    assert (exchange.cluster_key, exchange.user_key_file) == (key.secret, key.user_file)
    with pytest.raises(ConfigError, match="cluster key"):
        invoke("m", "--host", "0.0.0.0")
    assert len(started) == 1


def test_one_may_do_without_a_key_on_loopback_only(started: list[InstanceConfig]) -> None:
    invoke("m", "--no-user-key")
    assert (started[0].exchange.cluster_key, started[0].exchange.user_key_file) == (None, None)
    for option in ("--host", "--control-host"):
        with pytest.raises(ConfigError, match="cluster key"):
            invoke("m", "--no-user-key", option, "0.0.0.0")
    assert len(started) == 1


def test_a_start_without_a_state_folder_says_what_to_do(
    started: list[InstanceConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="KVFERRY_CLUSTER_KEY"):
        invoke("m")
    monkeypatch.setenv("KVFERRY_CLUSTER_KEY", "e" * 32)
    invoke("m")
    assert len(started) == 1
