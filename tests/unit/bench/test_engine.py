from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.bench.engine import EngineComparison, MeasureOptions, measure_engine
from tests.support.tiny_model import make_tiny_model


@pytest.mark.alone
@pytest.mark.slow
def test_every_figure_is_measured(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    options = MeasureOptions(num_rounds=2, prompt_tokens=(64, 96), dtype="float32")
    found = measure_engine(
        make_tiny_model(tmp_path / "model"), options, progress=lambda *step: seen.append(step)
    )
    assert [comparison.name for comparison in found.comparisons] == [
        "prefill 64 against plain",
        "prefill 96 against plain",
        "decode 64 against plain",
        "decode 96 against plain",
        "8 sequences at once against one",
    ]
    for comparison in found.comparisons:
        assert 0 < comparison.ratio_low <= comparison.ratio <= comparison.ratio_high
    assert seen[0] == (0, 15, "engine, 64 tokens")
    assert seen[-1] == (15, 15, "done")


def test_goals_have_a_direction() -> None:
    def comparison(ratio: float, at_most: bool) -> EngineComparison:
        return EngineComparison(
            name="x", unit="s", ours=1, reference=1, ratio=ratio, ratio_low=ratio,
            ratio_high=ratio, goal=2.0, at_most=at_most,
        )  # fmt: skip

    assert comparison(1.9, True).is_met
    assert not comparison(2.1, True).is_met
    assert comparison(2.1, False).is_met
    assert not comparison(1.9, False).is_met
