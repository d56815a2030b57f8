"""Log lines: one event a line, with the time, the level and the instance that wrote it.

Loggers are those of the standard library under ``kvferry``; only a process's entry point calls
``configure_logging``. Values are passed as ``extra={"fields": {...}}`` and written ``key=value``.
Prompts, answers and keys are never logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TextIO

from kvferry.errors import ConfigError

ROOT_LOGGER_NAME = "kvferry"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class LineFormatter(logging.Formatter):
    """``2030-01-31T09:00:00.000Z INFO prefill-0 connector.mover: text key=value``; UTC.

    Text from outside cannot begin a line of its own: control characters are written escaped.
    A traceback follows on lines that begin with two blanks.
    """

    converter = staticmethod(time.gmtime)

    def __init__(self, instance_id: str = "") -> None:
        super().__init__()
        self._instance_id = instance_id

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        moment = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        parts = [f"{moment}.{int(record.msecs):03d}Z", record.levelname]
        if self._instance_id:
            parts.append(self._instance_id)
        parts.append(record.name.removeprefix(f"{ROOT_LOGGER_NAME}.") + ":")
        parts.append(_escaped(record.getMessage()))
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            parts += [f"{key}={_field_text(value)}" for key, value in fields.items()]
        line = " ".join(parts)
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n  {_escaped(part)}" for part in trace.splitlines())
        return line


def configure_logging(level: str, *, stream: TextIO, instance_id: str = "") -> None:
    """Write log lines of ``level`` (debug, info, warning, error) and above to ``stream``.

    May be called again; the last call counts. Raises ``ConfigError`` for another level.
    """
    number = _LEVELS.get(level.lower())
    if number is None:
        raise ConfigError(f"log level {level!r} is not one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(instance_id))
    root = logging.getLogger(ROOT_LOGGER_NAME)
    root.handlers = [handler]
    root.setLevel(number)
    root.propagate = False


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    if name != ROOT_LOGGER_NAME and not name.startswith(f"{ROOT_LOGGER_NAME}."):
        name = f"{ROOT_LOGGER_NAME}.{name}"
    return logging.getLogger(name)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _field_text(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else _escaped(str(value))
    needs_quotes = not text or any(character in ' "=' for character in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if needs_quotes else text
