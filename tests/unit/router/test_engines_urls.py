"""How URLs of instances are written, and which are refused."""

from __future__ import annotations

import pytest

from kvferry.errors import ConfigError
from kvferry.router.engines import normalise_url


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:80/", "http://127.0.0.1:80"),
        (" https://Engine.example/base/ ", "https://engine.example/base"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_urls_are_normalised(given: str, url: str) -> None:
    assert normalise_url(given) == url


@pytest.mark.parametrize(
    "url",
    ["", "a:1", "ftp://a", "http://", "http://a:b", "http://u@a", "http://a?x=1", "http://[:"],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not of the form"):
        normalise_url(url)
