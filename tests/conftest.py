"""What every test may use: the length and the seed of the long ones."""

from __future__ import annotations

import os
import random

import pytest

_DEFAULT_SOAK_S = 20.0


@pytest.fixture
def soak_s() -> float:
    """How long a soak test goes on, in seconds; ``SOAK_S`` sets it."""
    return float(os.environ.get("SOAK_S", _DEFAULT_SOAK_S))


@pytest.fixture
def soak_random() -> random.Random:
    """Random numbers of a soak test; ``SOAK_SEED`` repeats a run, and is printed on failure."""
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**31))
    print(f"SOAK_SEED={seed}")  # noqa: T201 - shown by pytest when the test fails
    return random.Random(seed)
