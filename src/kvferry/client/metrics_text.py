"""Figures out of the text that ``GET /metrics`` answers, in Prometheus' format. Pure.

The text is read line by line, so that what one line of it may be does not hide another's figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def metric_total(text: str, name: str, **labels: str) -> float | None:
    """Return the sum of the samples called ``name`` that have ``labels``, and any others.

    None: there is no such sample.
    """
    values = [sample.value for sample in _samples(text, name, labels)]
    return math.fsum(values) if values else None


def metric_by_label(text: str, name: str, label: str, **labels: str) -> dict[str, float]:
    """Return the sums as ``metric_total`` does, by the value of one further label."""
    totals: dict[str, float] = {}
    for sample in _samples(text, name, labels):
        value = sample.labels.get(label, "")
        totals[value] = totals.get(value, 0.0) + sample.value
    return totals


def _samples(text: str, name: str, labels: dict[str, str]) -> Iterator[Sample]:
    for line in text.splitlines():
        if not line.startswith(name):
            continue
        try:
            families = list(text_string_to_metric_families(line))
        except ValueError:
            continue  # No line of a sample.
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample
