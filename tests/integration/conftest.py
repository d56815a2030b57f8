"""What integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.testing.process_forks import ProcessForks
from kvferry.testing.tiny_model import WIDE_SHAPE, make_tiny_model
from tests.integration.exchange_pair import Side, make_side


@pytest.fixture(scope="module")
def shared_side() -> Iterator[Side]:
    """One exchange for a module's tests that only knock at its door."""
    side = make_side("door")
    yield side
    side.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[ProcessForks]:
    """Starts real ``kvferry`` processes in a moment."""
    forks = ProcessForks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose handoffs are a few hundred KiB."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose handoffs are tens of MiB: 2 MiB a block of 16 tokens."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_tiny_model(folder, num_layers=1, shape=WIDE_SHAPE)
