"""What goes into an engine and what comes out: requests, sampling parameters, outputs.

Token ids only: text, chat templates and stop strings are the server's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.protocol.ids import RequestId
from kvferry.protocol.params import KvTransferParams, PrefillReport, TokenLogprob


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    NOT_NEEDED = "not_needed"
    """Role prefill: decode has all it needs, so the prefill was ended before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; names and defaults are vLLM's."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: the engine draws one."""
    max_tokens: int | None = None
    """None: as many as the context allows."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """Number of alternatives to report; 0 reports the sampled token's alone; None reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to continue."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    transfer: KvTransferParams | None = None
    """Role prefill: end after one token and offer the blocks. Role decode: receive them."""
    wants_progress: bool = False
    """Role prefill: say how far the prompt is computed, at admission and after each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """Where a request's time and bytes went. Times are monotonic seconds of this host."""

    arrived_s: float
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
    """Role decode: by which mode KV was to come, ``pull`` or ``push``."""
    receive_outcome: str = ""
    num_preemptions: int = 0
    prefill: PrefillReport | None = None
    """What prefill says of its own part, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One step of one request. The last one has a ``finish_reason`` and a ``report``."""

    request_id: RequestId
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request, where one did."""
    error: str | None = None
    """With ``FinishReason.ERROR``: what went wrong and what to do."""
    handoff: KvTransferParams | None = None
    """Role prefill, last output: what the decode leg needs."""
    report: RequestReport | None = None
    num_computed_tokens: int | None = None
    """Progress: leading prompt tokens whose KV is there. Such an output carries nothing else."""


OutputCallback = Callable[[TokenOutput], None]
"""Called on the engine's thread (or, for a handed-over first token, on the caller's)."""


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What a reset of the prefix cache has forgotten."""

    num_cached_blocks: int
    """Blocks that a prompt could have found, retained ones included."""
    num_retained_blocks: int
    num_conversations: int
    """Retained until then."""
    num_blocks_in_use: int
    """Of requests in service, and held for peers or in quarantine: they are found by nobody new,
    and their content is there until those let go."""
