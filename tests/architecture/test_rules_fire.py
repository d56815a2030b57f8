"""No rule of the connector's tables is there for show: what a planner is told follows each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

from kvferry.connector.pull.table import RECEIVER, SENDER
from kvferry.connector.push.table import PUSH_RECEIVER, PUSH_SENDER
from kvferry.connector.table import Table

TABLES: list[Table[StrEnum, StrEnum, StrEnum]] = [RECEIVER, SENDER, PUSH_SENDER, PUSH_RECEIVER]  # type: ignore[list-item]


def test_every_rule_is_followed_by_a_planner_in_some_test(root: Path, tmp_path: Path) -> None:
    followed_path = tmp_path / "rules.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.rule_recorder"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "tests/unit/connector", "--ignore-glob", "*_tables*"],
        cwd=root,
        env=os.environ | {"KVFERRY_TEST_RULES": str(followed_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    followed = {tuple(rule) for rule in json.loads(followed_path.read_text())}
    rules = {
        (table.name, str(state), str(event))
        for table in TABLES
        for state, event, _ in table.all_rules()
    }
    assert rules <= followed, f"never followed: {sorted(rules - followed)}"
