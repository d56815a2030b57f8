from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from kvferry.errors import ConfigError
from kvferry.observe.log import ROOT_LOGGER_NAME, configure_logging, get_logger


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger(ROOT_LOGGER_NAME)
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers, root.propagate = before[0], before[2]
    root.setLevel(before[1])


def logged(level: str = "info", instance_id: str = "prefill-0") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, stream=stream, instance_id=instance_id)
    return stream


def test_a_line_has_time_level_instance_place_and_fields() -> None:
    stream = logged()
    get_logger("kvferry.connector.mover").info(
        "receive ended", extra={"fields": {"outcome": "received", "seconds": 0.01234567, "why": ""}}
    )
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO prefill-0 connector\.mover: receive ended "
        r'outcome=received seconds=0\.0123457 why=""\n',
        stream.getvalue(),
    )


def test_text_from_outside_cannot_forge_a_line() -> None:
    stream = logged()
    get_logger("kvferry.server").warning(
        "refused %s", "x\n2030 ERROR all is lost\x1b[2J", extra={"fields": {"id": 'a b="c\r\n'}}
    )
    written = stream.getvalue()
    assert written.count("\n") == 1
    assert written.endswith('x\\n2030 ERROR all is lost\\x1b[2J id="a b=\\"c\\\\r\\\\n"\n')


def test_a_traceback_is_indented_below_its_line() -> None:
    stream = logged()
    try:
        raise ValueError("a\n\nbroken one")
    except ValueError:
        get_logger("kvferry.engine").exception("step failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("engine: step failed")
    assert rest[-1] == "  broken one"
    assert all(line.startswith("  ") for line in rest)


@pytest.mark.parametrize(("level", "expected"), [("debug", 3), ("INFO", 2), ("error", 1)])
def test_the_level_decides_what_is_written(level: str, expected: int) -> None:
    stream = logged(level)
    logger = get_logger("kvferry.engine")
    logger.debug("one")
    logger.info("two")
    logger.error("three")
    assert stream.getvalue().count("\n") == expected


def test_configuring_again_replaces_the_stream() -> None:
    first = logged()
    second = logged(instance_id="")
    get_logger("kvferry.engine").info("hello")
    assert first.getvalue() == ""
    assert second.getvalue().endswith("Z INFO engine: hello\n")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="'loud' is not one of debug, info, warning, error"):
        configure_logging("loud", stream=io.StringIO())


def test_loggers_outside_the_package_are_put_under_it() -> None:
    assert get_logger("kvferry.engine").name == "kvferry.engine"
    assert get_logger("kvferry").name == "kvferry"
    assert get_logger("kvferrymore").name == "kvferry.kvferrymore"
