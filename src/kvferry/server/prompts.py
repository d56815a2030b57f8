"""Prompts as token ids: texts, chats and ids from clients. Knows the tokenizer, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import RequestError
from kvferry.server.openai_types import ChatMessage, ChatRequest, TokenizeRequest
from kvferry.server.service import InstanceService

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatRendering:
    """How a conversation becomes text; the defaults are vLLM's."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


def rendering_of(request: ChatRequest | TokenizeRequest) -> ChatRendering:
    """Return the rendering that ``request`` asks for. Raises ``RequestError`` for both ends."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
            code="invalid_value",
        )
    adds_prompt = request.add_generation_prompt is not False and not continues
    return ChatRendering(adds_prompt, continues, bool(request.add_special_tokens))


async def encode_text(service: InstanceService, text: str, *, add_special_tokens: bool) -> Prompt:
    """Return the tokens of ``text``."""
    tokenizer = service.tokenizer
    return await service.run_for(
        len(text), lambda: tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    )


async def encode_chat(
    service: InstanceService, messages: Sequence[ChatMessage], rendering: ChatRendering
) -> Prompt:
    """Return the tokens of a conversation. Raises ``RequestError`` if the template refuses it."""
    if not messages:
        raise RequestError("messages must not be empty", param="messages", code="invalid_value")
    conversation = [message.for_template(index) for index, message in enumerate(messages)]
    tokenizer = service.tokenizer

    def encode() -> Prompt:
        text = tokenizer.render_chat(
            conversation,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final_message=rendering.continue_final_message,
        )
        return tuple(tokenizer.encode(text, add_special_tokens=rendering.add_special_tokens))

    num_chars = sum(len(message["content"]) for message in conversation)
    return await service.run_for(num_chars, encode)


def checked_token_ids(
    service: InstanceService, token_ids: Sequence[int], *, param: str = "prompt"
) -> Prompt:
    """Return ``token_ids``. Raises ``RequestError`` for one that the model does not have."""
    vocab_size = service.model.vocab_size
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} is not between 0 and {vocab_size - 1}",
                param=param,
                code="invalid_value",
            )
    return tuple(token_ids)
