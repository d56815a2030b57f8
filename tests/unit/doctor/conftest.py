"""Fixtures of the doctor's tests."""

from __future__ import annotations

from tests.unit.client.conftest import serve as serve
