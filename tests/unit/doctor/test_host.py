"""This host's settings and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.doctor.examination import host_facts, is_this_host


@pytest.mark.parametrize(("content", "scope"), [("1\n", 1), ("0", 0), ("", None)])
def test_the_ptrace_scope_is_read(tmp_path: Path, content: str, scope: int | None) -> None:
    path = tmp_path / "ptrace_scope"
    path.write_text(content)
    assert host_facts(path).ptrace_scope == scope


def test_without_yama_there_is_no_scope(tmp_path: Path) -> None:
    assert host_facts(tmp_path / "none").ptrace_scope is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"])
async def test_loopback_is_this_host(url: str) -> None:
    assert await is_this_host(url)


async def test_an_address_for_documentation_is_not() -> None:
    assert not await is_this_host("http://192.0.2.1:1")
