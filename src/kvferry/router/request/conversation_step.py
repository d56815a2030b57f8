"""The step that finds out whose request it is and which conversation it belongs to."""

from __future__ import annotations

from kvferry.protocol.client_headers import (
    READ_BACK_HEADER,
    RETENTION_HEADER,
    refuse_unknown_headers,
)
from kvferry.router.history.keys import Recogniser
from kvferry.router.history.recall import Conversation
from kvferry.router.history.tenant import salted, tenant_of
from kvferry.router.request.context import RequestContext
from kvferry.router.request.read_back import wanted_read_back, wanted_retention_s
from kvferry.router.request.state import StepTools


class ConversationStep:
    """Salts the body for its tenant, and looks the conversation up."""

    name = "conversation"

    def __init__(self, tools: StepTools, recogniser: Recogniser) -> None:
        self._tools = tools
        self._recogniser = recogniser

    async def run(self, context: RequestContext) -> None:
        """Fill in ``conversation``.

        Raises ``RequestError`` for a header that asks for nothing, or an id that is none.
        """
        config, headers = self._tools.config.conversations, context.request.headers
        refuse_unknown_headers(headers, config.header_names)
        read_back = wanted_read_back(headers.get(READ_BACK_HEADER), config.read_back)
        retention_s = wanted_retention_s(headers.get(RETENTION_HEADER))
        tenant = tenant_of(headers, config.tenant_header)
        context.body = salted(context.parsed(), tenant)
        keys = self._recogniser.keys_of(tenant, context.path, headers, context.body)
        recollection, result = await self._tools.recall.look_up(keys)
        self._tools.figures.conversation_lookups[result].inc()
        context.conversation = Conversation(
            keys=keys, read_back=read_back, retention_s=retention_s, recollection=recollection
        )
