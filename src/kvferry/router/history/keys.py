"""Whose request it is, and which conversation it belongs to: by an id, and by how it begins. Pure.

A tenant gets a salt that keeps its blocks from all others. Everything is scoped by tenant, model,
kind of endpoint and salt, with a secret of this process, so that nothing that one tenant sends
meets what another sent.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.errors import RequestError
from kvferry.router.history.prefix import DIGEST_BYTES, Digest, PromptPrefix, prefix_of
from kvferry.router.request.parsing import ParsedBody

ID_FIELDS = ("session_id", "conversation_id", "prompt_cache_key")
MAX_ID_CHARS = 256
# A character may be written as two escapes of six bytes each.
_MAX_ENCODED_ID_BYTES = 2 * 6 * MAX_ID_CHARS + 2
SALT_FIELD = "cache_salt"
_SALT_PERSON = b"kvferry-tenant"
_NULL = b"null"


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
        """Return the keys of a request of ``tenant`` to ``path``.

        Raises ``RequestError`` for an id that is none.
        """
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

    One that is empty, or null, is passed over. Raises ``RequestError`` for one that is no text or
    longer than ``MAX_ID_CHARS``, whether or not another goes before it.
    """
    named = [_header_id(name, headers[name]) for name in id_headers if name in headers]
    named += [_field_id(name, body.fields[name]) for name in ID_FIELDS if name in body.fields]
    return next((text for text in named if text), None)


def _header_id(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} must be a text in UTF-8", param=name, code="invalid_value"
        ) from error
    return _short_id(name, value)


def _field_id(name: str, raw: msgspec.Raw) -> str:
    encoded = bytes(raw).lstrip()
    if encoded == _NULL:
        return ""
    if encoded.startswith(b'"') and len(encoded) > _MAX_ENCODED_ID_BYTES:
        raise _too_long(name)
    try:
        text = msgspec.json.decode(encoded, type=str)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(f"{name} must be a text", param=name, code="invalid_type") from error
    return _short_id(name, text)


def _short_id(name: str, text: str) -> str:
    if len(text) > MAX_ID_CHARS:
        raise _too_long(name)
    return text.strip()


def _too_long(name: str) -> RequestError:
    return RequestError(
        f"{name} must have at most {MAX_ID_CHARS} characters", param=name, code="invalid_value"
    )


# -- tenants ----------------------------------------------------------------------------------
def tenant_of(headers: Mapping[str, str], tenant_header: str | None = None) -> bytes:
    """Return what tells the request's tenant from all others, empty where nothing does.

    That is the value of ``tenant_header`` where it is configured and sent, else the API key in
    ``Authorization``. It is a secret: neither logged nor passed on.
    """
    if tenant_header is not None:
        name = headers.get(tenant_header, "").strip()
        if name:
            return b"tenant:" + name.encode("utf-8", "surrogateescape")
    authorization = headers.get("Authorization", "").strip()
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer":
        key = key.strip()
        return b"bearer:" + key.encode("utf-8", "surrogateescape") if key else b""
    encoded = authorization.encode("utf-8", "surrogateescape")
    return b"authorization:" + encoded if encoded else b""


def salt_of(tenant: bytes, own_salt: str = "") -> str:
    """Return the salt of ``tenant``'s requests that themselves ask for ``own_salt``.

    64 hex digits, by BLAKE2b-256 of both and of nothing else: the same over restarts and on every
    router, and not to be turned back into the key.
    """
    hasher = hashlib.blake2b(digest_size=32, person=_SALT_PERSON)
    hasher.update(struct.pack("<Q", len(tenant)) + tenant)
    hasher.update(own_salt.encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()


def salted(body: ParsedBody, tenant: bytes) -> ParsedBody:
    """Return ``body`` with the salt of ``tenant``; without a tenant, as it is.

    Raises ``RequestError`` where the client's own salt is no text: an engine that read it otherwise
    could find two tenants' salts equal.
    """
    if not tenant:
        return body
    raw = body.fields.get(SALT_FIELD)
    own_salt = ""
    if raw is not None and bytes(raw) != _NULL:
        try:
            own_salt = msgspec.json.decode(raw, type=str)
        except msgspec.DecodeError as error:
            raise RequestError(
                f"{SALT_FIELD} must be a text", param=SALT_FIELD, code="invalid_type"
            ) from error
    return body.with_text(SALT_FIELD, salt_of(tenant, own_salt))
