"""Fixtures of the doctor's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.served_control_port import Answer, Serve, ServedControlPort


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve control ports until the test's end."""
    served: list[ServedControlPort] = []

    def start(key: bytes | None, answer: Answer) -> str:
        served.append(ServedControlPort(key, answer))
        return served[-1].address

    yield start
    for item in served:
        item.close()
