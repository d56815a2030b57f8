"""What an instance says of one request where it is asked by ``kv_report``: times, counts, outcome.

Its engine fills it in, and a newer one may say more; nothing is decided by it on a request's way.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.prefill_result import PrefillReport


class KvReport(msgspec.Struct, kw_only=True):
    """Where a request's time and bytes went. Times are monotonic seconds of the instance's host."""

    arrived_s: float | None = None
    prefill_end_s: float | None = None
    """End of the last forward of prefill, on whichever instance computed it."""
    first_token_s: float | None = None
    kv_ready_s: float | None = None
    """When a receive ended and its blocks were usable."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in this instance's own prefix cache."""
    num_received_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_received_bytes: int = 0
    transport: str = ""
    mode: str = ""
    """How the KV was to come from a peer, ``pull`` or ``push``; empty if it was not."""
    receive_outcome: str = ""
    num_preemptions: int = 0
    prefill: PrefillReport | None = None
    """What prefill says of its own part; None where another instance did not hand over."""
