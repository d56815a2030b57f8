"""Tenants and their salts: what tells them apart, what stays the same, what is left alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvferry.errors import RequestError
from kvferry.router.history.keys import salt_of, salted, tenant_of
from kvferry.router.request.parsing import parse_body

_text = st.text(max_size=12)


def _tenant(authorization: str, **others: str) -> bytes:
    return tenant_of(CIMultiDict({"authorization": authorization, **others}))


def test_api_key_is_the_tenant_however_its_scheme_is_written() -> None:
    assert _tenant("Bearer k") == _tenant("bearer   k ") != b""
    assert len({_tenant("Bearer k"), _tenant("Bearer K"), _tenant("Basic k"), _tenant("k")}) == 4


@pytest.mark.parametrize("authorization", ["", " ", "Bearer", "Bearer  "])
def test_no_key_is_no_tenant(authorization: str) -> None:
    assert _tenant(authorization) == b""
    assert tenant_of({}) == b""


def test_configured_header_goes_before_the_key() -> None:
    headers = CIMultiDict({"Authorization": "Bearer k", "x-tenant": "acme"})
    named = tenant_of(headers, "X-Tenant")
    assert named == tenant_of(CIMultiDict({"X-Tenant": " acme "}), "X-Tenant")
    assert named != tenant_of(CIMultiDict({"X-Tenant": "other"}), "X-Tenant")
    assert named != _tenant("Bearer acme")
    del headers["X-Tenant"]
    assert tenant_of(headers, "X-Tenant") == _tenant("Bearer k")


def test_salt_is_the_same_on_every_router() -> None:
    # A vector: another digest would part every tenant from what is cached already.
    assert salt_of(b"bearer:key-a") == (
        "aff30797301f36b42c9f31000245dd3b28cc4d20e47b08bca57ca49ca136b20b"
    )
    assert salt_of(b"bearer:key-a", "mine") == (
        "11e0cc273cdbf3a91a3a3a7c1332fe7ba332bb1f5143ff8d3b5f6837478aa25a"
    )


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=8), _text), min_size=2, unique=True))
def test_tenant_and_own_salt_both_tell_apart(pairs: list[tuple[bytes, str]]) -> None:
    salts = {salt_of(tenant, own) for tenant, own in pairs}
    assert len(salts) == len(pairs)
    assert all(len(salt) == 64 for salt in salts)


def test_body_gets_the_salt_and_keeps_the_rest_as_written() -> None:
    body = parse_body(b'{"a": 1.50, "cache_salt": "mine", "b": "\\u00e9", "cache_salt": "last"}')
    result = salted(body, b"bearer:k")
    salt = salt_of(b"bearer:k", "last").encode()
    assert result.encoded == b'{"a":1.50,"cache_salt":"' + salt + b'","b":"\\u00e9"}'
    assert result.traits == body.traits
    assert "cache_salt" in body.fields


@pytest.mark.parametrize("own", [b"", b', "cache_salt": null', b', "cache_salt": ""'])
def test_no_own_salt_in_any_form_is_the_same(own: bytes) -> None:
    result = salted(parse_body(b'{"a": 1' + own + b"}"), b"bearer:k")
    assert json.loads(result.encoded) == {"a": 1, "cache_salt": salt_of(b"bearer:k")}


def test_without_a_tenant_the_body_is_left_alone() -> None:
    body = parse_body(b'{ "cache_salt": 5}')
    assert salted(body, b"") is body


@pytest.mark.parametrize("own", [b"5", b'["x"]', b"true"])
def test_own_salt_that_is_no_text_is_refused(own: bytes) -> None:
    with pytest.raises(RequestError, match="cache_salt must be a text") as caught:
        salted(parse_body(b'{"cache_salt": ' + own + b"}"), b"bearer:k")
    assert caught.value.param == "cache_salt"
