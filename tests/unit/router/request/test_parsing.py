"""Bodies: what is looked at, what is stripped, what stays byte for byte."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RequestError
from kvferry.router.request.parsing import RequestTraits, parse_body

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("body", "traits"),
    [
        (b'{"prompt":"[1,2]"}', RequestTraits()),
        (b'{"stream":true, "n":1}', RequestTraits(is_stream=True)),
        (b'{"stream":null,"n":null}', RequestTraits()),
        (b'{"n":3}', RequestTraits(num_choices=3)),
        (b'{"n":1,"best_of":4}', RequestTraits(num_choices=4)),
        (b'{"prompt":[ "a" , "b"]}', RequestTraits(num_prompts=2)),
        (b'{"prompt":[[1],[2],[3]]}', RequestTraits(num_prompts=3)),
        (b'{"prompt":[1,2,3]}', RequestTraits()),
        (b'{"prompt":[]}', RequestTraits()),
    ],
)
def test_traits(body: bytes, traits: RequestTraits) -> None:
    parsed = parse_body(body)
    assert parsed.traits == traits
    assert parsed.encoded is body


def test_body_without_transfer_params_is_kept_as_it_came() -> None:
    body = b' { "temperature" : 0.10 , "vllm_xargs": {"a": 1} } '
    assert parse_body(body).encoded == body


def test_transfer_params_go_and_the_rest_stays_as_written() -> None:
    body = b'{"a": 1.50, "kv_transfer_params": {"x": 1}, "kv_transfer_params": 2, "b": "\\u00e9"}'
    parsed = parse_body(body)
    assert parsed.encoded == b'{"a":1.50,"b":"\\u00e9"}'
    assert "kv_transfer_params" not in parsed.fields


def test_null_transfer_params_go_too() -> None:
    assert parse_body(b'{"kv_transfer_params":null}').encoded == b"{}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"stream":1}', "stream"),
        (b'{"n":"2"}', "n"),
        (b'{"best_of":-1}', "best_of"),
        (b"{", None),
    ],
)
def test_refusal_names_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(body)
    assert caught.value.param == param


@given(st.dictionaries(st.text(max_size=6), _json, max_size=5), _json)
def test_any_object_keeps_every_other_field(fields: dict[str, object], params: object) -> None:
    for name in ("stream", "n", "best_of", "kv_transfer_params", "vllm_xargs"):
        fields.pop(name, None)
    body = msgspec.json.encode({**fields, "kv_transfer_params": params})
    assert msgspec.json.decode(parse_body(body).encoded) == fields


@given(st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(msgspec.json.decode(parse_body(body).encoded), dict)
