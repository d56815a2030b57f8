"""Bodies of requests as typed structures, and the rules that their values obey.

Names and defaults are OpenAI's and vLLM's. Fields that are known and not supported are refused by
name unless they hold what they would do nothing with; unknown fields are ignored, since clients
send many. Knows no engine state.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from kvferry.errors import RequestError

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of ``/v1/completions`` where none is given, as OpenAI and vLLM have it."""

_JSON_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`")


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Fields of OpenAI's and vLLM's APIs that this server does not serve.

    Typed Any: whatever is in them is refused, not read.
    """

    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    best_of: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    logit_bias: Any = None
    min_p: Any = None
    modalities: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    tool_choice: Any = None
    tools: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


# What asks for nothing, beside null, false, 0 and empty text, lists and objects.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}


class GenerationFields(UnsupportedFields, kw_only=True):
    """What both endpoints share; None is the default, since clients send null for it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    kv_report: bool | None = None
    kv_progress: bool | None = None
    kv_transfer_params: Any = None
    """Checked by ``protocol.params``, once it is known to be trusted."""

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries usage."""
        return bool(self.include_usage and self.stream_options.continuous_usage_stats)  # type: ignore[union-attr]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt, as text or as token ids. Raises ``RequestError`` if there is none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError(
                "prompt is required: a text, a list of token ids, or a list of either",
                param="prompt",
                code="missing_required_parameter",
            )
        if isinstance(prompt[0], int):
            return [[_token_id(token) for token in prompt]]
        if any(isinstance(item, int) for item in prompt):
            raise _mixed_prompt()
        return [item for item in prompt if not isinstance(item, int)]


def _token_id(token: str | int | list[int]) -> int:
    if not isinstance(token, int):
        raise _mixed_prompt()
    return token


def _mixed_prompt() -> RequestError:
    return RequestError(
        "prompt must not mix token ids with texts or lists", param="prompt", code="invalid_type"
    )


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self, index: int) -> dict[str, Any]:
        """Return what the chat template reads; ``index`` names the message in errors."""
        message: dict[str, Any] = {"role": self.role, "content": self._text(index)}
        for field in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            value = getattr(self, field)
            if value is not None:
                message[field] = value
        return message

    def _text(self, index: int) -> str:
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        for number, part in enumerate(self.content):
            if part.type not in ("text", "input_text") or part.text is None:
                raise RequestError(
                    f"content part of type {part.type!r} is not supported: only text is",
                    param=f"messages[{index}].content[{number}]",
                    code="unsupported_value",
                )
        return "\n".join(part.text or "" for part in self.content)


class ChatRequest(GenerationFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def parse_body(body: bytes, kind: type[Body]) -> Body:
    """Return ``body`` as a ``kind``. Raises ``RequestError`` naming the field that is wrong."""
    try:
        parsed = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"the request body is not valid JSON: {error}", code="invalid_json"
        ) from error
    if isinstance(parsed, UnsupportedFields):
        refuse_unsupported(parsed)
    return parsed


def _validation_error(message: str) -> RequestError:
    match = _JSON_PATH.match(message)
    what, path = (match["what"], match["path"]) if match else (message, "")
    missing = _MISSING_FIELD.search(what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    where = f"{path}: " if path else "the request body: "
    return RequestError(f"{where}{what}", param=path or None, code="invalid_type")


def refuse_unsupported(request: UnsupportedFields) -> None:
    """Raise ``RequestError`` for the first field in use that is not supported."""
    for name in UnsupportedFields.__struct_fields__:
        value = getattr(request, name)
        if value and value not in _NEUTRAL.get(name, ()):
            raise RequestError(
                f"{name} is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )
