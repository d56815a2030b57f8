"""Figures out of Prometheus' text."""

from __future__ import annotations

from kvferry.client.metrics_text import metric_by_label, metric_total

_TEXT = """# HELP a_total Things
# TYPE a_total counter
a_total{x="1",y="p"} 2.0
a_total{x="2",y="p"} 3.0
a_total{x="2",y="q} with \\"quotes\\""} 4e+0
a_created{x="1"} 9.0
b 4.0
b_bucket{le="+Inf"} 7
c not a number
strange NaN
"""


def test_a_metric_is_summed_over_its_labels() -> None:
    assert metric_total(_TEXT, "a_total") == 9.0
    assert metric_total(_TEXT, "a_total", x="2") == 7.0
    assert metric_total(_TEXT, "a_total", x="2", y="p") == 3.0
    assert metric_total(_TEXT, "b") == 4.0


def test_what_is_not_there_or_no_sample_is_none() -> None:
    for name in ("a", "c", "d", "HELP"):
        assert metric_total(_TEXT, name) is None
    assert metric_total(_TEXT, "a_total", x="3") is None
    assert metric_total("", "a_total") is None


def test_sums_are_told_apart_by_one_label() -> None:
    assert metric_by_label(_TEXT, "a_total", "x", y="p") == {"1": 2.0, "2": 3.0}
    assert metric_by_label(_TEXT, "b", "x") == {"": 4.0}
    assert metric_by_label(_TEXT, "c", "x") == {}
