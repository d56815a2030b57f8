"""N-1 and N+1: bytes that today's release sends, and what a made-up next one adds anywhere."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from kvferry.errors import RemoteProtocolError
from kvferry.protocol import codec
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.ids import PROTOCOL_VERSION
from kvferry.protocol.messages import (
    Declined,
    DeclineReason,
    Failed,
    FailureReason,
    Message,
    Release,
    ReleaseOutcome,
)
from tests.unit.protocol.recorded_version_3 import RECORDED

MORE = {"anything": [1, "two", None]}


def fields_of(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(data)
    return fields


def with_more(value: Any) -> Any:  # noqa: ANN401 - any MessagePack value
    """Add a field to every map in ``value``."""
    if isinstance(value, dict):
        return {key: with_more(inner) for key, inner in value.items()} | {"added_next": MORE}
    return [with_more(inner) for inner in value] if isinstance(value, list) else value


def assert_within(sent: Any, known: Any) -> None:  # noqa: ANN401
    """Maps have no key that a reader who forbids unknown ones does not know."""
    if isinstance(sent, dict) and isinstance(known, dict):
        assert sent.keys() <= known.keys()
        for name, inner in sent.items():
            assert_within(inner, known[name])
    elif isinstance(sent, list) and isinstance(known, list):
        for mine, theirs in zip(sent, known, strict=False):
            assert_within(mine, theirs)


def test_every_message_is_recorded() -> None:
    assert set(RECORDED) == {kind.__struct_config__.tag for kind in get_args(Message)}


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_release_before_sends_is_understood_whole(name: str) -> None:
    envelope = codec.decode(RECORDED[name])
    assert type(envelope.message).__struct_config__.tag == name
    sent, again = fields_of(RECORDED[name]), fields_of(msgspec.msgpack.encode(envelope))
    assert again["message"].items() >= sent["message"].items()


@pytest.mark.parametrize("name", RECORDED)
def test_the_release_before_understands_what_is_sent(name: str) -> None:
    envelope = codec.decode(RECORDED[name])
    sent = fields_of(codec.encode(envelope.sequence, envelope.message))["message"]
    known = fields_of(RECORDED[name])["message"]
    for field, inner in sent.items():  # it ignores a message's own unknown fields
        assert_within(inner, known.get(field))


@pytest.mark.parametrize("name", RECORDED)
def test_a_field_of_the_next_version_is_ignored_at_every_level(name: str) -> None:
    fields = with_more(fields_of(RECORDED[name])) | {"version": PROTOCOL_VERSION + 1}
    envelope = codec.decode(msgspec.msgpack.encode(fields))
    assert envelope.version == PROTOCOL_VERSION + 1
    assert envelope.message == codec.decode(RECORDED[name]).message


def test_an_unknown_field_changes_neither_fingerprint_nor_comparison() -> None:
    fields = fields_of(RECORDED["hello"])["message"]["layout"]
    known = msgspec.convert(fields, KVLayout)
    newer = msgspec.convert(with_more(fields), KVLayout)
    newer.require_equal(known)
    known.require_equal(newer)
    assert newer.fingerprint() == known.fingerprint()
    assert newer == known


def with_reason(name: str, field: str) -> Any:  # noqa: ANN401 - a message
    fields = fields_of(RECORDED[name])
    fields["message"][field] = "a_mood_of_the_next_version"
    return codec.decode(msgspec.msgpack.encode(fields)).message


def test_an_unknown_reason_is_a_refusal_and_no_garbage() -> None:
    declined, failed = with_reason("declined", "reason"), with_reason("failed", "reason")
    assert isinstance(declined, Declined)
    assert (declined.reason, declined.detail) == (DeclineReason.PRESSURE, "why")
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.is_quiet) == (FailureReason.TRANSPORT, True)
    released = with_reason("release", "outcome")
    assert isinstance(released, Release)
    assert released.outcome is ReleaseOutcome.FAILED


@pytest.mark.parametrize("value", [7, None, ["gone"], b"gone"])
def test_a_reason_that_is_no_text_is_malformed(value: object) -> None:
    fields = fields_of(RECORDED["declined"])
    fields["message"]["reason"] = value
    with pytest.raises(RemoteProtocolError):
        codec.decode(msgspec.msgpack.encode(fields))
