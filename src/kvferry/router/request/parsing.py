"""A client's body: its top-level fields, still encoded, and the few that routing looks at.

Values are kept as the bytes that came, so that what an engine gets is what the client wrote.
Everything that is not looked at here is for the engine to check.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from kvferry.errors import RequestError
from kvferry.protocol.params import TRANSFER_FIELD

_EXTRA_FIELD = "vllm_xargs"
_NULL = b"null"


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """What routing decides by."""

    is_stream: bool = False
    num_choices: int = 1
    num_prompts: int = 1


ONE_SEQUENCE = RequestTraits()


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A checked body. ``fields`` never holds transfer parameters."""

    fields: dict[str, msgspec.Raw]
    traits: RequestTraits
    as_it_came: bytes | None
    """The client's bytes; None where a field was changed since."""

    @property
    def encoded(self) -> bytes:
        """The whole body."""
        return msgspec.json.encode(self.fields) if self.as_it_came is None else self.as_it_came

    def with_text(self, name: str, text: str) -> ParsedBody:
        """Return this body with ``text`` as field ``name``; all other fields as they were."""
        fields = self.fields | {name: msgspec.Raw(msgspec.json.encode(text))}
        return replace(self, fields=fields, as_it_came=None)


NO_BODY = ParsedBody({}, ONE_SEQUENCE, b"{}")
"""Of a request that is not parsed yet."""

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def parse_body(body: bytes) -> ParsedBody:
    """Return the body without any transfer parameters of the client's own.

    Raises ``RequestError`` when it is no JSON object or a routing field has a wrong type.
    """
    try:
        fields = _fields_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError("the request body must be a JSON object", code="invalid_json") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(
            f"the request body is not valid JSON: {error}", code="invalid_json"
        ) from error
    was_stripped = strip_transfer_params(fields)
    traits = RequestTraits(
        is_stream=_flag(fields, "stream"),
        num_choices=max(_count(fields, "n"), _count(fields, "best_of")),
        num_prompts=_num_prompts(fields.get("prompt")),
    )
    return ParsedBody(fields, traits, None if was_stripped else body)


def strip_transfer_params(fields: dict[str, msgspec.Raw]) -> bool:
    """Remove transfer parameters wherever an engine would read them; return whether any were."""
    was_stripped = fields.pop(TRANSFER_FIELD, None) is not None
    extra = fields.get(_EXTRA_FIELD)
    if extra is None:
        return was_stripped
    # vLLM merges this object into the arguments that its connectors read.
    try:
        extra_fields = _fields_decoder.decode(extra)
    except (msgspec.DecodeError, RecursionError):
        return was_stripped
    if extra_fields.pop(TRANSFER_FIELD, None) is None:
        return was_stripped
    fields[_EXTRA_FIELD] = msgspec.Raw(msgspec.json.encode(extra_fields))
    return True


def _flag(fields: dict[str, msgspec.Raw], name: str) -> bool:
    raw = fields.get(name)
    if raw is None:
        return False
    value = bytes(raw)
    if value == b"true":
        return True
    if value in (b"false", _NULL):
        return False
    raise RequestError(f"{name} must be true or false", param=name, code="invalid_type")


def _count(fields: dict[str, msgspec.Raw], name: str) -> int:
    raw = fields.get(name)
    if raw is None or bytes(raw) == _NULL:
        return 1
    try:
        value = msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError as error:
        raise RequestError(f"{name} must be an integer", param=name, code="invalid_type") from error
    if value < 1:
        raise RequestError(f"{name} must be at least 1", param=name, code="invalid_value")
    return value


def _num_prompts(raw: msgspec.Raw | None) -> int:
    """Count prompts: a string or a list of token ids is one, a list of either is its length."""
    if raw is None:
        return 1
    encoded = bytes(raw)
    if not encoded.startswith(b"["):
        return 1
    if encoded[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    return len(_list_decoder.decode(encoded))
