"""A prompt as a chain of digests, by which a later prompt that begins with it is found. Pure.

Each digest covers one piece of the prompt and, through its parent's digest, all before it. Nothing
but digests is kept of a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvferry.router.request.parsing import ParsedBody

Digest = bytes
DIGEST_BYTES = 16
MAX_PIECES = 4096
"""Of one prompt; what comes after them tells nothing apart."""
PIECE_BYTES = 256
"""Of a completion's prompt: about 64 tokens of text."""
FINE_PIECE_BYTES = 16
_MAX_CANONICAL_BYTES = 64 * 1024
"""A larger message, an image for example, is taken as it is written."""

# What stands before the messages in the prompts of common chat templates, or changes them.
_PREAMBLE_FIELDS = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs")

_raw_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_any_decoder = msgspec.json.Decoder()
_sorted_encoder = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class PromptTip:
    """The end of a prompt, in a form to be remembered."""

    keys: tuple[Digest, ...]
    """What a later turn finds it by."""
    length: int
    """In messages, or in bytes; 0 for a prompt that is not to be recognised."""
    digest: Digest
    """Of exactly this length."""
    is_whole: bool = True
    """Whether nothing of the prompt comes after it."""


NO_TIP = PromptTip((), 0, b"")


@dataclass(frozen=True, slots=True)
class MessagePrefix:
    """A chat; its unit is the message. Without any, nothing is recognised by it."""

    digests: tuple[Digest, ...] = ()
    """Of the first message, the first two, and so on."""

    @property
    def tip(self) -> PromptTip:
        """Its own end: all messages."""
        if not self.digests:
            return NO_TIP
        is_whole = len(self.digests) < MAX_PIECES
        return PromptTip(self.digests[-1:], len(self.digests), self.digests[-1], is_whole)

    def digest_at(self, length: int) -> Digest | None:
        """Return the digest of the first ``length`` messages; None where there are fewer."""
        return self.digests[length - 1] if 0 < length <= len(self.digests) else None

    def keys_beyond(self, length: int) -> Sequence[Digest]:
        """Return the digests of more than ``length`` messages, the most messages first."""
        return self.digests[length:][::-1]

    def finer_keys(self, key: Digest | None) -> Sequence[Digest]:
        """Return none: a message is not divided."""
        del key
        return ()


@dataclass(frozen=True, slots=True)
class TextPrefix:
    """A completion's prompt; its unit is the byte.

    Remembered at its last whole piece, at its last whole fine piece, and by its exact end, so that
    prompts that differ only in their last few bytes are not taken for one conversation.
    """

    digests: tuple[Digest, ...]
    """``digests[n]`` covers the first n pieces; the first is the root."""
    text: bytes

    @property
    def tip(self) -> PromptTip:
        """Its own end: all of the text."""
        length = len(self.text)
        fine_length = length - length % FINE_PIECE_BYTES
        if not fine_length:
            return NO_TIP
        # The last whole piece leads to the fine one; the root needs no such mark.
        keys = dict.fromkeys((self._at(fine_length), *self.digests[1:][-1:]))
        is_whole = length < MAX_PIECES * PIECE_BYTES
        return PromptTip(tuple(keys), length, self._at(length), is_whole)

    def digest_at(self, length: int) -> Digest | None:
        """Return the digest of the first ``length`` bytes; None where there are fewer."""
        return self._at(length) if 0 < length <= len(self.text) else None

    def keys_beyond(self, length: int) -> Sequence[Digest]:
        """Return the digests of the whole pieces that end after ``length`` bytes, last first."""
        return self.digests[length // PIECE_BYTES + 1 :][::-1]

    def finer_keys(self, key: Digest | None) -> Sequence[Digest]:
        """Return the digests of the fine pieces between ``key`` and the next whole piece.

        The longest first; None stands for the start.
        """
        start = 0 if key is None else self.digests.index(key) * PIECE_BYTES
        end = min(start + PIECE_BYTES - 1, len(self.text))
        end -= end % FINE_PIECE_BYTES
        return [self._at(length) for length in range(end, start, -FINE_PIECE_BYTES)]

    def _at(self, length: int) -> Digest:
        number, num_rest = divmod(length, PIECE_BYTES)
        digest = self.digests[number]
        return _chained(digest, self.text[length - num_rest : length]) if num_rest else digest


PromptPrefix = MessagePrefix | TextPrefix
"""A prompt that may be the continuation of one that is remembered."""


def prefix_of(body: ParsedBody, root: Digest) -> PromptPrefix:
    """Return the prefix of a body's messages or prompt; nothing for one without or with several.

    ``root`` stands before the first piece: two prefixes of different roots have nothing in common.
    """
    messages = body.fields.get("messages")
    if messages is not None:
        return _of_messages(body, messages, root)
    prompt = body.fields.get("prompt")
    if prompt is None or body.traits.num_prompts > 1:
        return MessagePrefix()
    kind, text = _flat_prompt(bytes(prompt))
    return _of_text(text, _chained(root, kind))


def _of_messages(body: ParsedBody, raw: msgspec.Raw, root: Digest) -> PromptPrefix:
    try:
        messages = _raw_list_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return MessagePrefix()  # Whatever it is, an engine will refuse it.
    digest = root
    for name in _PREAMBLE_FIELDS:
        field = body.fields.get(name)
        if field is not None:
            digest = _chained(digest, name.encode() + b":" + _canonical(field))
    digests = []
    for message in messages[:MAX_PIECES]:
        digest = _chained(digest, _canonical(message))
        digests.append(digest)
    return MessagePrefix(tuple(digests))


def _of_text(text: bytes, root: Digest) -> PromptPrefix:
    text = text[: MAX_PIECES * PIECE_BYTES]
    digests = [root]
    for start in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
        digests.append(_chained(digests[-1], text[start : start + PIECE_BYTES]))
    return TextPrefix(tuple(digests), text)


def _flat_prompt(prompt: bytes) -> tuple[bytes, bytes]:
    """Return what kind of prompt it is, and its text.

    A text is in UTF-8, token ids are digits and commas: a longer prompt only adds to their end.
    """
    prompt = prompt.strip()
    if prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"["):
        prompt = prompt[1:-1].strip()  # One prompt in a list.
    if prompt[:1] == b'"':
        try:
            return b"text", msgspec.json.decode(prompt, type=str).encode()
        except ValueError:  # Not UTF-8: for an engine to refuse.
            return b"raw", b""
    return b"ids", prompt.translate(None, b" \t\r\n").strip(b"[]")


def _canonical(value: msgspec.Raw) -> bytes:
    """Return the same bytes for the same JSON value, however it was written."""
    raw = bytes(value)
    if len(raw) > _MAX_CANONICAL_BYTES:
        return raw
    try:
        return _sorted_encoder.encode(_any_decoder.decode(raw))
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return raw


def _chained(parent: Digest, piece: bytes) -> Digest:
    return hashlib.blake2b(parent + piece, digest_size=DIGEST_BYTES).digest()
