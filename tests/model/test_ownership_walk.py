"""Random walks over a prefill and two decode instances with engines without manners.

Every block carries whose tokens it holds. Whatever happens: what a posted READ or WRITE may still
copy is right and lands in blocks that nobody else has, what is received is the receiver's own
prompt's, a cache never finds another's, and in the end all pools are whole.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.model.ownership.walk import OwnershipWalk

SETTINGS = settings(max_examples=250, stateful_step_count=50, deadline=None)

OwnershipWalk.TestCase.settings = SETTINGS


@pytest.mark.slow
class TestOwnershipWalk(OwnershipWalk.TestCase):  # type: ignore[name-defined,misc]
    """See ``OwnershipWalk``."""
