"""The tables in docs/protocol.md are those of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.render_state_tables import to_markdown, to_mermaid

from kvferry.connector.pull.table import RECEIVER
from kvferry.connector.push.table import PUSH_SENDER

ROOT = Path(__file__).parents[3]


def test_the_page_shows_the_tables_as_they_are() -> None:
    script = ROOT / "scripts" / "render_state_tables.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_tables_are_shown_whole() -> None:
    assert len(to_markdown(RECEIVER).splitlines()) == 2 + len(RECEIVER.rules)
    num_rules = len(PUSH_SENDER.rules) + len(PUSH_SENDER.automatic)
    assert len(to_mermaid(PUSH_SENDER).splitlines()) == 3 + num_rules
