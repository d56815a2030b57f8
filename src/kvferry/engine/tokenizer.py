"""Text ↔ tokens: the model folder's tokenizer, its chat template and incremental detokenising.

Owns what text a token stream makes. Knows nothing of requests, stop strings or HTTP. The fast
backend is called directly: it has no state that a call changes, so any thread may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    return Tokenizer(tokenizer)


class Tokenizer:
    """A Hugging Face fast tokenizer. Thread-safe.

    ``digest`` is equal where texts become the same tokens, ``chat_template_digest`` where
    conversations become the same text; that is empty without a template.
    """

    # The foreign tokenizer is untyped, hence Any.
    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Both would be applied to every prompt, and shared by all threads.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.digest = content_digest(self._backend.to_str().encode())
        self.chat_template_digest = self._template_digest()
        self._special_ids = frozenset(int(token) for token in tokenizer.all_special_ids) | {
            token
            for token, added in self._backend.get_added_tokens_decoder().items()
            if added.special
        }

    def _template_digest(self) -> str:
        """Return a digest of the chat template and the special tokens that it may name."""
        template, special_tokens = self._tokenizer.chat_template, self._tokenizer.special_tokens_map
        if not template:
            return ""
        names = {name: str(token) for name, token in special_tokens.items()}
        encode = msgspec.json.Encoder(order="sorted").encode
        return content_digest(encode(template), encode(names))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of ``text``. Does not hold the interpreter's lock on long texts."""
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
        """Return the chat template's text; encode it without special tokens.

        Raises ``RequestError`` if there is no template or it refuses the messages.
        """
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
        """Return the text of a whole sequence."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own strings, byte alphabets and word marks included."""
        return [self._backend.id_to_token(token) or "" for token in token_ids]

    def stream(
        self, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> DetokenizerStream:
        """Return a detokeniser for what follows ``prompt_token_ids``."""
        return DetokenizerStream(
            lambda tokens: self.decode(tokens, skip_special_tokens=False),
            skipped_ids=self._special_ids if skip_special_tokens else frozenset(),
            context_token_ids=prompt_token_ids[-_CONTEXT_TOKENS:],
        )
