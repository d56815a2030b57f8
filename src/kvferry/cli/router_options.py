"""The options of how a router recognises and uses conversations, as one configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable

import click

_Command = Callable[..., None]

_OPTIONS = (
    click.option(
        "--conversation-header",
        "id_headers",
        multiple=True,
        metavar="NAME",
        default=("X-Session-ID", "X-Conversation-ID"),
        show_default=True,
        help="A header that may name a request's conversation; repeat for more, the first that is "
        "sent counts. Else the body's session_id, conversation_id or prompt_cache_key does, else "
        "the conversation is recognised by how its prompt begins.",
    ),
    click.option(
        "--tenant-header",
        metavar="NAME",
        help="A header that names the tenant in place of the API key; to be set by a gateway that "
        "lets no client set it.  [default: the API key in Authorization]",
    ),
    click.option(
        "--max-conversations",
        default=100_000,
        show_default=True,
        type=click.IntRange(1),
        help="Conversation ids and turns that are remembered; the least recently used go first.",
    ),
    click.option(
        "--conversation-ttl-s",
        default=480.0,
        show_default=True,
        type=click.FloatRange(min=0, min_open=True),
        help="How long a turn is remembered, from the end of its answer: the instances' retention.",
    ),
    click.option(
        "--holder-slack-requests",
        default=4,
        show_default=True,
        type=click.IntRange(0),
        help="The decode instance that holds a conversation is chosen while it has at most so many "
        "more requests in flight than the least busy one.",
    ),
    click.option(
        "--read-back/--no-read-back",
        default=True,
        show_default=True,
        help="Tell prefill which instance holds the conversation, so that it reads the history "
        "instead of computing it. A request may set it by X-KVFerry-Read-Back: auto or off.",
    ),
)


def conversation_options(function: _Command) -> _Command:
    """Add the options to a command, which gets them as ``conversations``."""

    @functools.wraps(function)
    def with_group(
        *,
        id_headers: tuple[str, ...],
        tenant_header: str | None,
        max_conversations: int,
        conversation_ttl_s: float,
        holder_slack_requests: int,
        read_back: bool,
        **values: object,
    ) -> None:
        from kvferry.router.config import ConversationConfig, ReadBack

        conversations = ConversationConfig(
            id_headers=id_headers,
            tenant_header=tenant_header,
            max_conversations=max_conversations,
            conversation_ttl_s=conversation_ttl_s,
            holder_slack_requests=holder_slack_requests,
            read_back=ReadBack.AUTO if read_back else ReadBack.OFF,
        )
        function(**values, conversations=conversations)

    decorated: _Command = with_group
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
