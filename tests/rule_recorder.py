"""A pytest plugin that writes down which rules of the connector's tables were followed.

``pytest -p tests.rule_recorder``, with the file's name in KVFERRY_TEST_RULES.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.connector.table import Table

_followed: set[tuple[str, str, str]] = set()
_follow: Callable[..., None] = Table._follow


def _note(*what: Any) -> None:  # noqa: ANN401 - a rule of any table
    table, subject, event = what[:3]
    _followed.add((table.name, str(subject.state), str(event)))
    _follow(*what)


Table._follow = _note  # type: ignore[method-assign, assignment]


def pytest_sessionfinish() -> None:
    Path(os.environ["KVFERRY_TEST_RULES"]).write_text(json.dumps(sorted(_followed)))
