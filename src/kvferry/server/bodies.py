"""Bodies of requests: OpenAI's and vLLM's fields, and the rules that their values obey.

Defaults are vLLM's neutral ones, whatever the model's generation config proposes. Fields that are
known and not supported are refused by name unless they hold what they would do nothing with;
unknown fields are ignored, since clients send many. Knows no engine state.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from kvferry.engine.request import MAX_LOGPROBS, SAMPLING_BOUNDS, Bounds, SamplingParams
from kvferry.errors import RequestError

MAX_CHOICES = 128
"""Of one request, over all its prompts."""
_COPIED = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Fields whose defaults are the engine's own."""
_DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of ``/v1/completions`` where none is given, as OpenAI and vLLM have it."""
_MAX_STOP_STRINGS = 64
_MAX_STOP_STRING_CHARS = 1024
_MAX_CACHE_SALT_CHARS = 1024
_MAX_SEED = 2**63

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

    @property
    def max_answer_tokens(self) -> int | None:
        """Most tokens of the answer."""
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report of each token; None: no log probabilities."""
        return self.logprobs

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
        token_ids = [item for item in prompt if isinstance(item, int)]
        if len(token_ids) == len(prompt):
            return [token_ids]
        if token_ids:
            raise RequestError(
                "prompt must not mix token ids with texts or lists",
                param="prompt",
                code="invalid_type",
            )
        return [item for item in prompt if not isinstance(item, int)]


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

    @property
    def max_answer_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as the context allows."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def num_logprobs(self) -> int | None:
        """See ``CompletionRequest``. Raises ``RequestError`` for a number without the switch."""
        if not self.logprobs and self.top_logprobs:
            raise RequestError.invalid_value(
                "top_logprobs", "top_logprobs needs logprobs to be true"
            )
        return self.top_logprobs or 0 if self.logprobs else None


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
    if isinstance(parsed, GenerationFields):
        _refuse_unsupported(parsed)
        _check_values(parsed)
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


def _refuse_unsupported(request: UnsupportedFields) -> None:
    """Raise ``RequestError`` for the first field in use that is not supported."""
    for name in UnsupportedFields.__struct_fields__:
        value = getattr(request, name)
        if value and value not in _NEUTRAL.get(name, ()):
            raise RequestError(
                f"{name} is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )


_BOUNDS = SAMPLING_BOUNDS | {
    "max_completion_tokens": Bounds(1),
    "n": Bounds(1, MAX_CHOICES),
    "seed": Bounds(-_MAX_SEED, _MAX_SEED - 1),
    "top_logprobs": Bounds(0, MAX_LOGPROBS),
}


def _check_values(request: GenerationFields) -> None:
    """Raise ``RequestError`` naming the first field whose value is out of its bounds."""
    for name, bounds in _BOUNDS.items():
        # Chats have logprobs too, as true or false; neither is out of bounds.
        bounds.check(name, getattr(request, name, None))
    stop = request.stop_strings
    if len(stop) > _MAX_STOP_STRINGS:
        raise RequestError.invalid_value(
            "stop", f"stop must have at most {_MAX_STOP_STRINGS} texts, not {len(stop)}"
        )
    if any(not 0 < len(text) <= _MAX_STOP_STRING_CHARS for text in stop):
        raise RequestError.invalid_value(
            "stop", f"stop must have texts of 1 to {_MAX_STOP_STRING_CHARS} characters"
        )
    if request.stream_options is not None and not request.stream:
        raise RequestError.invalid_value(
            "stream_options", "stream_options is for streamed answers: set stream to true"
        )
    if len(request.cache_salt or "") > _MAX_CACHE_SALT_CHARS:
        raise RequestError.invalid_value(
            "cache_salt", f"cache_salt must have at most {_MAX_CACHE_SALT_CHARS} characters"
        )


def sampling_params(request: CompletionRequest | ChatRequest, choice: int) -> SamplingParams:
    """Return the sampling parameters of choice number ``choice``; seeds differ by that number.

    Raises ``RequestError`` for values that contradict each other.
    """
    max_tokens = request.max_answer_tokens
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError.invalid_value(
            "min_tokens", f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})"
        )
    given = {name: getattr(request, name) for name in _COPIED}
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        top_k=max(0, request.top_k or 0),
        # Wrapped, so that the largest seed has successors too.
        seed=None if request.seed is None else (request.seed + choice) % _MAX_SEED,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=request.num_logprobs,
    )
