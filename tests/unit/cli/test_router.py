"""Options of ``kvferry router`` reach its configuration."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.router import router
from kvferry.observe import log
from kvferry.router import service
from kvferry.router.config import ConversationConfig, ReadBack, RouterConfig

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
