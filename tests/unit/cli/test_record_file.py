"""A record is written whole, or an error says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli.record_file import write_record
from kvferry.errors import ConfigError


def test_record_is_json_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, {"record": "x", "samples": [1.5]})
    assert json.loads(path.read_text()) == {"record": "x", "samples": [1.5]}
    assert list(tmp_path.iterdir()) == [path]


def test_no_path_writes_nothing(tmp_path: Path) -> None:
    write_record(None, {"record": "x"})
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        write_record(tmp_path / "absent" / "record.json", {})
