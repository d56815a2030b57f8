"""Write the connector's state tables into docs/protocol.md, or check that they are there.

python scripts/render_state_tables.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvferry.connector.pull.table import RECEIVER, SENDER
from kvferry.connector.push.table import PUSH_RECEIVER, PUSH_SENDER
from kvferry.connector.table import ActionT, EventT, StateT, Table

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
BEGIN = "<!-- tables:begin -->"
END = "<!-- tables:end -->"
TABLES: tuple[Any, ...] = (RECEIVER, SENDER, PUSH_RECEIVER, PUSH_SENDER)


def to_markdown(table: Table[StateT, EventT, ActionT]) -> str:
    """Return the rules as a Markdown table."""
    lines = ["| state | event | next state | actions |", "|---|---|---|---|"]
    for state, event, rule in table.all_rules():
        actions = ", ".join(f"`{action}`" for action in rule.actions) or "none"
        lines.append(f"| `{state}` | `{event}` | `{rule.next_state}` | {actions} |")
    return "\n".join(lines)


def to_mermaid(table: Table[StateT, EventT, ActionT]) -> str:
    """Return the rules as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial}"]
    for state, event, rule in table.all_rules():
        lines.append(f"    {state} --> {rule.next_state}: {event}")
    lines.append(f"    {table.final} --> [*]")
    return "\n".join(lines)


def render(page: str) -> str:
    """Return ``page`` with the text between the markers made anew from the tables."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    sections = [
        f"### The {table.name}\n\n```mermaid\n{to_mermaid(table)}\n```\n\n{to_markdown(table)}"
        for table in TABLES
    ]
    return f"{head}{BEGIN}\n\n" + "\n\n".join(sections) + f"\n\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """Write, or with ``--check`` compare; return the exit status."""
    page = PAGE.read_text()
    rendered = render(page)
    if arguments == ["--check"]:
        if page != rendered:
            sys.stderr.write(f"{PAGE.name} is stale: run python {Path(__file__).name}\n")
            return 1
        return 0
    PAGE.write_text(rendered)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
