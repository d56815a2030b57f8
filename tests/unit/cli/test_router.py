"""Options of ``kvferry router`` reach its configuration."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.router import router
from kvferry.client.engine_kinds import EngineKind, NixlAddress
from kvferry.errors import ConfigError
from kvferry.observe import log
from kvferry.router import service
from kvferry.router.config import ConversationConfig, ReadBack, RouterConfig
from kvferry.router.engines import EngineConfig
from tests.own_key import own_key

_URLS = ("--prefill", "http://a:1", "--decode", "http://b:1")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[RouterConfig]:
    """What would have been served, in order."""
    configs: list[RouterConfig] = []

    async def serve(config: RouterConfig, ready_file: Path | None) -> None:
        del ready_file
        configs.append(config)

    monkeypatch.setattr(service, "serve", serve)
    monkeypatch.setattr("uvloop.run", _run_to_its_end)
    monkeypatch.setattr(log, "configure_logging", lambda *args, **options: None)
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)
    return configs


def _run_to_its_end(coroutine: Coroutine[object, object, None]) -> None:
    with pytest.raises(StopIteration):
        coroutine.send(None)


def _invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(router, [*_URLS, *arguments])
    return result.exit_code, result.output


def test_conversations_have_their_defaults(served: list[RouterConfig]) -> None:
    assert _invoke() == (0, "")
    assert served[0].conversations == ConversationConfig()


def test_times_of_probes_reach_the_configuration(served: list[RouterConfig]) -> None:
    assert _invoke("--health-interval-s", "3", "--health-timeout-s", "4") == (0, "")
    assert (served[0].health_interval_s, served[0].health_timeout_s) == (3.0, 4.0)


def test_options_of_conversations_reach_the_configuration(served: list[RouterConfig]) -> None:
    assert _invoke(
        *("--conversation-header", "X-A", "--conversation-header", "X-B"),
        *("--tenant-header", "X-Tenant", "--max-conversations", "5", "--conversation-ttl-s", "6"),
        *("--holder-slack-requests", "7", "--no-read-back"),
    ) == (0, "")
    assert served[0].conversations == ConversationConfig(
        id_headers=("X-A", "X-B"),
        tenant_header="X-Tenant",
        max_conversations=5,
        conversation_ttl_s=6.0,
        read_back=ReadBack.OFF,
        holder_slack_requests=7,
    )


@pytest.mark.parametrize(
    "arguments", [("--max-conversations", "0"), ("--conversation-ttl-s", "0")], ids=lambda a: a[0]
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], served: list[RouterConfig]) -> None:
    assert _invoke(*arguments)[0] == 2
    assert served == []


def test_engines_are_kvferrys_by_default(served: list[RouterConfig]) -> None:
    assert _invoke() == (0, "")
    assert served[0].engines == EngineConfig()


def test_control_ports_reach_the_configuration(served: list[RouterConfig]) -> None:
    assert _invoke(
        *("--control", "http://a:1=tcp://a:7"), *("--control", "http://b:1/=tcp://b:7")
    ) == (0, "")
    assert served[0].engines == EngineConfig(
        control_addresses={"http://a:1": "tcp://a:7", "http://b:1": "tcp://b:7"}
    )


def test_the_kind_of_engine_reaches_the_configuration(served: list[RouterConfig]) -> None:
    assert _invoke("--engine", "vllm-nixl-push", "--nixl", "http://a:1=e@a:5600/tp2") == (0, "")
    assert served[0].engines == EngineConfig(
        kind=EngineKind.VLLM_NIXL_PUSH,
        nixl_addresses={"http://a:1": NixlAddress("e", "a", 5600, 2)},
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--control", "http://z:1=tcp://z:7"), "http://z:1 is not among"),
        (("--nixl", "http://b:1=e@b:5600"), "http://b:1 is not among --prefill"),
        (("--control", "http://a:1"), "no instance URL"),
    ],
)
def test_wrong_addresses_are_refused_by_name(
    arguments: tuple[str, ...], named: str, served: list[RouterConfig]
) -> None:
    with pytest.raises(ConfigError, match=named):
        CliRunner().invoke(router, [*_URLS, *arguments], catch_exceptions=False)
    assert served == []


_LOCAL = ("--prefill", "http://127.0.0.1:1", "--decode", "http://10.0.0.1:1")


def test_on_loopback_the_users_own_key_is_used(served: list[RouterConfig]) -> None:
    assert CliRunner().invoke(router, [*_LOCAL]).exit_code == 0
    assert CliRunner().invoke(router, [*_LOCAL, "--no-user-key"]).exit_code == 0
    assert CliRunner().invoke(router, [*_LOCAL, "--engine", "vllm-nixl"]).exit_code == 0
    assert _invoke() == (0, "")
    key = own_key()
    own, *others = served
    assert (own.cluster_key, own.user_key_file) == (key.secret, key.user_file)
    assert [(config.cluster_key, config.user_key_file) for config in others] == [(None, None)] * 3


def test_a_cluster_key_goes_first(
    served: list[RouterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_CLUSTER_KEY", "e" * 32)
    assert CliRunner().invoke(router, [*_LOCAL]).exit_code == 0
    assert (served[0].cluster_key, served[0].user_key_file) == (b"e" * 32, None)
