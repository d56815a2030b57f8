"""Lists of token counts on the command line."""

from __future__ import annotations

import click
import pytest

from kvferry.cli.options import Listed


@pytest.mark.parametrize(
    ("text", "counts"), [("512", (512,)), ("512,2048", (512, 2048)), ((7,), (7,))]
)
def test_lists(text: object, counts: tuple[int, ...]) -> None:
    assert Listed(int).convert(text, None, None) == counts


@pytest.mark.parametrize("text", ["", "x", "512,", "0", "5,-1", "1.5"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="512,2048"):
        Listed(int).convert(text, None, None)
