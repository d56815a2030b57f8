"""Random walks over a prefill and two decode instances with engines without manners.

Every block carries whose tokens it holds. Whatever happens: what a posted READ or WRITE may still
copy is right and lands in blocks that nobody else has, what is received is the receiver's own
prompt's, a cache never finds another's, and in the end all pools are whole.
``test_ownership_mutants`` shows that it would be seen otherwise.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.model.ownership.walk import SETTINGS, OwnershipWalk


@pytest.mark.slow
@pytest.mark.timeout(600)  # what it finds is made shorter for minutes
def test_nobody_gets_anybody_elses_tokens() -> None:
    run_state_machine_as_test(OwnershipWalk, settings=SETTINGS)
