"""What an instance says of one request where it is asked by ``kv_report``: times, counts, outcome.

For measurements and checks from outside; nothing is decided by it on the way of a request.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.prefill_result import PrefillReport


class KvReport(msgspec.Struct, frozen=True):
    """What an instance says of one request. Times are monotonic seconds of its host."""

    arrived_s: float | None = None
    prefill_end_s: float | None = None
    first_token_s: float | None = None
    kv_ready_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
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
    samples_first_token: bool = False
    """Whether decode takes a step of its own for the first token; the client knows, no instance."""
