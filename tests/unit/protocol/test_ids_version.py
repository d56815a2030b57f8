from __future__ import annotations

import pytest

from kvferry.protocol.ids import OLDEST_SUPPORTED_VERSION, PROTOCOL_VERSION, is_supported


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (OLDEST_SUPPORTED_VERSION - 1, False),
        (OLDEST_SUPPORTED_VERSION, True),
        (PROTOCOL_VERSION, True),
        (PROTOCOL_VERSION + 1, True),
        (PROTOCOL_VERSION + 2, False),
    ],
)
def test_neighbouring_versions_interoperate(version: int, expected: bool) -> None:
    assert is_supported(version) is expected
