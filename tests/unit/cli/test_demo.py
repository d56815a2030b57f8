"""The demo's table row."""

from __future__ import annotations

from kvferry.bench.chats import ChatRow
from kvferry.cli.demo import _HEADER, format_row


def _row(*, is_same: bool, text: str, transport: str = "nixl") -> ChatRow:
    return ChatRow(
        mode="push",
        num_prompt_tokens=2345,
        ttft_s=1.234,
        second_gap_s=0.0456,
        num_received_bytes=1_234_567,
        transport=transport,
        moved_by="push",
        outcome="received",
        is_same=is_same,
        text=text,
    )


def test_row_shows_every_figure() -> None:
    shown = format_row(_row(is_same=True, text="A ferry\ncarries"))
    assert " ".join(shown.split()) == "2345 push 1.23 s 45.6 ms 1,234,567 nixl yes A ferry carries"


def test_columns_end_where_their_titles_end() -> None:
    shown = format_row(_row(is_same=True, text="x"))
    assert shown.index("2345") + 4 == _HEADER.index("prompt tokens") + len("prompt tokens")
    assert shown.index("push") == _HEADER.index("mode")
    assert shown.index("1,234,567") + 9 == _HEADER.index("moved bytes") + len("moved bytes")
    assert shown.index("nixl") + 4 == _HEADER.index("transport") + len("transport")
    assert shown.index("yes") + 3 == _HEADER.index("same tokens") + len("same tokens")


def test_difference_stands_out_and_long_answers_are_cut() -> None:
    shown = format_row(_row(is_same=False, text="y" * 100, transport=""))
    assert " NO " in shown
    assert shown.endswith("y…")
    assert len(shown) < 130
