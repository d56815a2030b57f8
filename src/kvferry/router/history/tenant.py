"""Whose request it is, and the salt that keeps one tenant's blocks from all others. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import msgspec

from kvferry.errors import RequestError
from kvferry.router.request.parsing import ParsedBody

SALT_FIELD = "cache_salt"
_SALT_PERSON = b"kvferry-tenant"
_NULL = b"null"


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
