"""Which conversation a request belongs to: by an id that it names, and by how its prompt begins.

Pure. Everything is scoped by tenant, model, kind of endpoint and salt, with a secret of this
process, so that nothing that one tenant sends meets what another sent.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.router.parsing import ParsedBody
from kvferry.router.prefix import DIGEST_BYTES, Digest, PromptPrefix, prefix_of
from kvferry.router.tenant import SALT_FIELD

ID_FIELDS = ("session_id", "conversation_id", "prompt_cache_key")
MAX_ID_CHARS = 256
# Each character may be written as an escape of six, or as up to four bytes.
_MAX_ENCODED_ID_BYTES = 6 * MAX_ID_CHARS + 2


@dataclass(frozen=True, slots=True)
class ConversationKeys:
    """What a request's conversation is looked up by: digests only."""

    by_id: Digest | None
    prefix: PromptPrefix

    def to_remember(self) -> tuple[Digest, ...]:
        """Return the keys under which this turn is remembered."""
        own = self.prefix.tip.keys
        return own if self.by_id is None else (self.by_id, *own)

    def to_forget(self) -> tuple[Digest, ...]:
        """Return the keys under which this turn and the ones before it may be remembered."""
        return (*self.to_remember(), *self.prefix.keys_beyond(0))


@dataclass(frozen=True, slots=True)
class Recogniser:
    """Finds the keys of requests; ``secret`` is drawn anew for each process."""

    secret: bytes
    id_headers: Sequence[str]

    def keys_of(
        self, tenant: bytes, path: str, headers: Mapping[str, str], body: ParsedBody
    ) -> ConversationKeys:
        """Return the keys of a request of ``tenant`` to ``path``."""
        scope = self._digest(
            tenant,
            path.encode(),
            bytes(body.fields.get("model", b"")),
            bytes(body.fields.get(SALT_FIELD, b"")),
        )
        given = conversation_id(headers, body, self.id_headers)
        by_id = None if given is None else self._digest(scope, b"id", given.encode())
        return ConversationKeys(by_id, prefix_of(body, self._digest(scope, b"prefix")))

    def _digest(self, *parts: bytes) -> Digest:
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, key=self.secret)
        for part in parts:
            hasher.update(struct.pack("<Q", len(part)) + part)
        return hasher.digest()


def conversation_id(
    headers: Mapping[str, str], body: ParsedBody, id_headers: Sequence[str]
) -> str | None:
    """Return the id that a request names: the first in its headers, else in its body.

    One that is empty, longer than ``MAX_ID_CHARS`` or no text is passed over.
    """
    for name in id_headers:
        value = headers.get(name)
        if value is not None and _is_usable(value.strip()):
            return value.strip()
    for name in ID_FIELDS:
        raw = body.fields.get(name)
        if raw is None or len(bytes(raw)) > _MAX_ENCODED_ID_BYTES:
            continue
        try:
            text = msgspec.json.decode(raw, type=str).strip()
        except msgspec.DecodeError:
            continue
        if _is_usable(text):
            return text
    return None


def _is_usable(text: str) -> bool:
    if not 0 < len(text) <= MAX_ID_CHARS:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
