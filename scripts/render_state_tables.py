"""Write the connector's state tables into docs/protocol.md, or check that they are there.

python scripts/render_state_tables.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvferry.connector.pull.table import RECEIVER, SENDER
from kvferry.connector.push.table import PUSH_RECEIVER, PUSH_SENDER

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
BEGIN = "<!-- tables:begin -->"
END = "<!-- tables:end -->"


def render(page: str) -> str:
    """Return ``page`` with the text between the markers made anew from the tables."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    sections = [
        f"### The {table.name}\n\n```mermaid\n{table.to_mermaid()}\n```\n\n{table.to_markdown()}"
        for table in (RECEIVER, SENDER, PUSH_RECEIVER, PUSH_SENDER)
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
