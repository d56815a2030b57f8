from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model."""
    pytest.importorskip("torch")
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
