"""What every test may use: the length and the seed of the long ones."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import settings

from kvferry.protocol.keys import CLUSTER_KEY_VARIABLE, FOLDER_VARIABLE

_DEFAULT_SOAK_S = 20.0

# An example's time is the machine's: on a busy one it says nothing about the code.
settings.register_profile("no deadline")
settings.load_profile("no deadline")


@pytest.fixture(scope="session", autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All processes that tests start have a user's key of their own, not that of whoever tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("state")))
        patch.delenv(CLUSTER_KEY_VARIABLE, raising=False)
        yield


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
