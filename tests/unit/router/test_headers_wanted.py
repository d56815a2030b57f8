"""Headers by which a request asks for its mode and controls its conversation."""

from __future__ import annotations

import pytest

from kvferry.errors import RequestError
from kvferry.router.config import ReadBack, RouteMode
from kvferry.router.headers import wanted_mode, wanted_read_back, wanted_retention_s


def test_read_back_is_as_configured_unless_asked() -> None:
    for configured in ReadBack:
        assert wanted_read_back(None, configured) is configured
        assert wanted_read_back(" Off ", configured) is ReadBack.OFF
        assert wanted_read_back("auto", configured) is ReadBack.AUTO


@pytest.mark.parametrize("wrong", ["", "on", "auto,off"])
def test_other_values_are_refused_naming_the_allowed(wrong: str) -> None:
    with pytest.raises(RequestError, match="X-KVFerry-Read-Back must be one of auto, off"):
        wanted_read_back(wrong, ReadBack.AUTO)


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, None), ("0", 0), (" 12.5 ", 12.5), ("86400", 86400)]
)
def test_retention_is_in_seconds(header: str | None, seconds: float | None) -> None:
    assert wanted_retention_s(header) == seconds


@pytest.mark.parametrize("wrong", ["", "-1", "86401", "nan", "inf", "1s", "1,2"])
def test_other_retentions_are_refused(wrong: str) -> None:
    with pytest.raises(RequestError, match="X-KVFerry-Retention-S must be 0 to 86400") as caught:
        wanted_retention_s(wrong)
    assert caught.value.param == "X-KVFerry-Retention-S"


def test_a_request_may_ask_for_a_mode() -> None:
    assert wanted_mode(None, RouteMode.PULL) is RouteMode.PULL
    assert wanted_mode(" Push ", RouteMode.PULL) is RouteMode.PUSH
    for wrong in ("", "p", "push,pull"):
        with pytest.raises(RequestError, match="auto, pull, push"):
            wanted_mode(wrong, RouteMode.AUTO)
