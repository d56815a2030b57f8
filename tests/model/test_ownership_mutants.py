"""The ownership walk finds what it is there to find: each mutant, within its default length."""

from __future__ import annotations

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvferry.errors import LocalProtocolError
from tests.model.ownership.content import OwnershipError
from tests.model.ownership.mutants import MUTANTS, Mutant
from tests.model.ownership.walk import SETTINGS, OwnershipWalk

FIRST_IS_ENOUGH = settings(
    SETTINGS, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False, database=None
)
FOUND = (OwnershipError, LocalProtocolError)
"""By the oracle; or a reference is taken where there is none, which the pool itself refuses."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_the_walk_finds(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(FOUND):
        run_state_machine_as_test(seed(1)(_fresh_walk()), settings=FIRST_IS_ENOUGH)


def _fresh_walk() -> type[OwnershipWalk]:
    """A class of its own, since a seed stays with it."""

    class Walk(OwnershipWalk):
        pass

    return Walk
