"""Options: what is refused, and how URLs are written."""

from __future__ import annotations

import re

import pytest

from kvferry.errors import ConfigError
from kvferry.router.config import ConversationConfig, RouterConfig


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("prefill_urls", ()), ("decode_urls", ()), ("port", 70_000), ("max_inflight", 0),
        ("request_timeout_s", 0.0), ("shutdown_timeout_s", -1.0),
        ("decode_choice_progress", 1.5), ("max_outstanding_handoffs", 0), ("queue_timeout_s", 0.0),
    ],
)  # fmt: skip
def test_wrong_options_are_named(option: str, value: object) -> None:
    options = {"prefill_urls": ("http://p",), "decode_urls": ("http://d",), option: value}
    named = option.removesuffix("_urls").replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{named}"):
        RouterConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("max_conversations", 0, "max-conversations"),
        ("conversation_ttl_s", 0.0, "conversation-ttl-s"),
        ("conversation_ttl_s", float("nan"), "conversation-ttl-s"),
        ("holder_slack_requests", -1, "holder-slack-requests"),
        *(
            (option, value, f"{flag}: {text!r} is no name of a header: give letters, digits")
            for text in (
                "no name",
                "X-Colon:",
                "",
                " X-Space",
                "X-Line\n",
                "X-\u00dc",
                "a,b",
                "(a)",
            )
            for option, value, flag in (
                ("id_headers", ("X-Good", text), "conversation-header"),
                ("tenant_header", text, "tenant-header"),
            )
        ),
    ],
)
def test_wrong_options_of_conversations_are_named(option: str, value: object, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--{named}")):
        ConversationConfig(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["X-Session-ID", "x", "0", "!#$%&'*+-.^_`|~"])
def test_any_token_may_name_a_header(name: str) -> None:
    assert ConversationConfig(id_headers=(name,), tenant_header=name).header_names == (name, name)
