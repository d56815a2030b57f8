"""Text ↔ tokens: the model folder's tokenizer, its chat template and incremental detokenising.

Owns what text a token stream makes. Knows nothing of requests, stop strings or HTTP. The fast
backend is called directly: it has no state that a call changes, so any thread may use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvferry.errors import ConfigError, RequestError
from kvferry.protocol.compatibility import content_digest

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are no (or not yet a) character."""
_MAX_PENDING_TOKENS = 8
"""A character has at most four bytes, hence tokens; more than this pending is no character."""
_CONTEXT_TOKENS = 5
"""Prompt tokens that a stream looks back on, so that a leading space is not taken for the text's
beginning."""

Message = Mapping[str, Any]
"""One chat message as the template sees it: role, content, whatever else the template reads."""


class DetokenizerStream:
    """Text of one growing token sequence; each token costs the decoding of a few tokens.

    Text is withheld while it ends within a character; ``finish`` gives what remains.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        skipped_ids: frozenset[int] = frozenset(),
        context_token_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._tokens = [token for token in context_token_ids if token not in skipped_ids]
        self._num_read = len(self._tokens)
        self._read_text = decode(self._tokens) if self._tokens else ""
        # A context that ends within a character: its last tokens are this stream's to show.
        while self._num_read and self._read_text.endswith(REPLACEMENT):
            self._num_read -= 1
            self._read_text = decode(self._tokens[: self._num_read])

    def step(self, token_id: int) -> str:
        """Add one token; return the text that is now complete, often of several tokens or none."""
        if token_id in self._skipped_ids:
            return ""
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        if len(self._tokens) - self._num_read < _MAX_PENDING_TOKENS and (
            text.endswith(REPLACEMENT) or len(text) <= len(self._read_text)
        ):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Return the text still withheld: an unfinished character shows as U+FFFD."""
        return self._advance(self._decode(self._tokens))

    def _advance(self, text: str) -> str:
        """Emit what ``text`` adds, and keep only the tokens that were just emitted as context."""
        emitted = text[len(self._read_text) :]
        self._tokens = self._tokens[self._num_read :]
        self._num_read = len(self._tokens)
        self._read_text = self._decode(self._tokens) if self._tokens else ""
        return emitted


class Tokenizer(Protocol):
    """What the server needs of a tokenizer. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; added tokens are included."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end generation, from the model's generation config and the tokenizer."""
        ...

    @property
    def digest(self) -> str:
        """Equal where texts become the same tokens."""
        ...

    @property
    def chat_template_digest(self) -> str:
        """Equal where conversations become the same text; empty without a template."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of ``text``. Does not hold the interpreter's lock on long texts."""
        ...

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the chat template's text; encode it without special tokens.

        Raises ``RequestError`` if there is no template or it refuses the messages.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence."""
        ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own strings, byte alphabets and word marks included."""
        ...

    def stream(
        self, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> DetokenizerStream:
        """Return a detokeniser for what follows ``prompt_token_ids``."""
        ...


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Return the tokenizer of ``model_dir``. Raises ``ConfigError`` if there is none or a slow one.

    Imports transformers, for the chat template's rendering rules.
    """
    import transformers  # heavy

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {model_dir} has no usable tokenizer: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"model folder {model_dir} has no tokenizer.json (a fast tokenizer)")
    return FastTokenizer(tokenizer, _eos_token_ids(model_dir, tokenizer.eos_token_id))


def _eos_token_ids(model_dir: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    ids = [] if tokenizer_eos is None else [int(tokenizer_eos)]
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if not path.is_file():
            continue
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        if value is not None:
            ids += [int(token) for token in (value if isinstance(value, list) else [value])]
            break
    return tuple(dict.fromkeys(ids))


def _template_digest(tokenizer: Any) -> str:  # noqa: ANN401 - as below
    """Return a digest of the chat template and the special tokens that it may name."""
    if not tokenizer.chat_template:
        return ""
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    encode = msgspec.json.Encoder(order="sorted").encode
    return content_digest(encode(tokenizer.chat_template), encode(names))


class FastTokenizer:
    """A ``Tokenizer`` over a Hugging Face fast tokenizer."""

    # The foreign tokenizer is untyped, hence Any.
    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Both would be applied to every prompt, and shared by all threads.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._eos_token_ids = eos_token_ids
        self._digest = content_digest(self._backend.to_str().encode())
        self._template_digest = _template_digest(tokenizer)
        self._vocab_size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self._special_ids = frozenset(int(token) for token in tokenizer.all_special_ids) | {
            token
            for token, added in self._backend.get_added_tokens_decoder().items()
            if added.special
        }

    @property
    def vocab_size(self) -> int:
        """See ``Tokenizer``."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """See ``Tokenizer``."""
        return self._eos_token_ids

    @property
    def digest(self) -> str:
        """See ``Tokenizer``."""
        return self._digest

    @property
    def chat_template_digest(self) -> str:
        """See ``Tokenizer``."""
        return self._template_digest

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See ``Tokenizer``."""
        # The batch call alone gives the interpreter's lock up while it works.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """See ``Tokenizer``."""
        import jinja2

        if not self._tokenizer.chat_template:
            raise RequestError(
                "this model's tokenizer has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}",
                param="messages",
                code="invalid_value",
            ) from error
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """See ``Tokenizer``."""
        return [self._backend.id_to_token(token) or "" for token in token_ids]

    def stream(
        self, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> DetokenizerStream:
        """See ``Tokenizer``."""
        return DetokenizerStream(
            lambda tokens: self.decode(tokens, skip_special_tokens=False),
            skipped_ids=self._special_ids if skip_special_tokens else frozenset(),
            context_token_ids=prompt_token_ids[-_CONTEXT_TOKENS:],
        )
