"""Write tables of options into the docs, or check that they are there.

python scripts/render_option_tables.py [--check]

A page asks for a table by ``<!-- options: flags MODULE:CLASS [FIELD…] -->``, or ``keys`` in place
of ``flags``; the table follows, up to ``<!-- options end -->``.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from kvferry.options import REQUIRED, OptionField, option_fields

DOCS = Path(__file__).parent.parent / "docs"
_PLACE = re.compile(
    r"<!-- options: (flags|keys) (kvferry[\w.]+):(\w+)([\w ]*) -->\n.*?<!-- options end -->",
    re.DOTALL,
)


def render(page: str) -> str:
    """Return ``page`` with every table made anew from its configuration."""
    return _PLACE.sub(_table, page)


def _table(place: re.Match[str]) -> str:
    form, module, name, names = place.groups()
    entries = option_fields(getattr(importlib.import_module(module), name))
    wanted = names.split()
    lines = [
        f"| `{entry.flag if form == 'flags' else entry.name}` | {_default(entry, form)} "
        f"| {_meaning(entry)} |"
        for entry in entries
        if (entry.name in wanted if wanted else form == "keys" or entry.flag)
    ]
    head = ["| option | default | meaning |", "|---|---|---|"]
    first_line = place[0].partition("\n")[0]
    return "\n".join([first_line, *head, *lines, "<!-- options end -->"])


def _default(entry: OptionField, form: str) -> str:
    if form == "flags" and "/" in entry.flag:
        given = entry.option.parse or bool
        return _shown(given(True) == entry.default)
    if form == "flags" and entry.kind is bool:
        return "off"
    if entry.default is REQUIRED:
        return "must be given"
    if entry.option.default_text:
        return entry.option.default_text
    if entry.kind is bool:
        return str(entry.default).lower()
    return _shown(entry.default)


def _shown(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else f"`{value}`" if isinstance(value, str) else str(value)


def _meaning(entry: OptionField) -> str:
    option = entry.option
    bounds = (option.minimum, option.above, option.maximum)
    if not option.choices and bounds == (None, None, None):
        return option.help
    text = option.range_text
    return f"{option.help} {text[0].upper()}{text[1:]}{_or(option.none_word)}."


def _or(word: str) -> str:
    return f", or {word}" if word else ""


def main(arguments: list[str]) -> int:
    """Write, or with ``--check`` compare; return the exit status."""
    stale = []
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        rendered = render(page)
        if page != rendered:
            stale.append(path.name)
            if arguments != ["--check"]:
                path.write_text(rendered)
    if arguments == ["--check"] and stale:
        sys.stderr.write(f"{', '.join(stale)}: stale: run python {Path(__file__).name}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
