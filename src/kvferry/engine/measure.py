"""Measure the engine against the plain model library, in one process and on one thread.

The arms alternate within each round, so that a slow stretch of the machine hits both; what is
reported is the median of the rounds' ratios, with their spread.
"""

from __future__ import annotations

import itertools
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from kvferry.blocks.pool import BlockPool
from kvferry.clock import SystemClock
from kvferry.engine.config import EngineConfig
from kvferry.engine.model import load_model, quiet_library
from kvferry.engine.paged_cache import PagedCache
from kvferry.engine.request import EngineRequest, SamplingParams, TokenOutput
from kvferry.engine.runner import Engine
from kvferry.errors import EngineError
from kvferry.protocol.ids import RequestId

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what comes next."""

_TOKEN_TIMEOUT_S = 300.0
_BATCH = 8
_BATCH_PROMPT_TOKENS = 512
_NUM_GAPS = 8


class MeasureOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. ``prompt_tokens`` are the lengths of prefill and the contexts of decode."""

    num_rounds: int = 5
    prompt_tokens: tuple[int, ...] = (512, 2048)
    dtype: str = "bfloat16"
    num_threads: int = 1
    seed: int = 0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. ``ratio`` is the median over rounds, ``ratio_low`` and ``_high`` their extremes.

    ``ours`` and ``reference`` are medians in ``unit``.
    """

    name: str
    unit: str
    ours: float
    reference: float
    ratio: float
    ratio_low: float
    ratio_high: float
    goal: float
    at_most: bool
    """Whether the goal is an upper bound of the ratio, or a lower one."""

    @property
    def is_met(self) -> bool:
        """Whether the median ratio meets the goal."""
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal


class EngineMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one run found."""

    model: str
    options: MeasureOptions
    num_prepacked_linears: int
    comparisons: tuple[Comparison, ...]

    @property
    def is_met(self) -> bool:
        """Whether every goal is met."""
        return all(comparison.is_met for comparison in self.comparisons)


class _Samples(msgspec.Struct):
    """Seconds by figure, one entry a round."""

    ours: dict[str, list[float]] = msgspec.field(default_factory=dict)
    plain: dict[str, list[float]] = msgspec.field(default_factory=dict)


def measure_engine(
    model_dir: Path | str,
    options: MeasureOptions | None = None,
    *,
    progress: Progress = lambda done, total, label: None,
) -> EngineMeasurement:
    """Return prefill, decode and batch figures of the model in ``model_dir``.

    Takes about 15 s a round for a model of 135 million parameters. Raises ``ConfigError`` if the
    model cannot be loaded, ``EngineError`` if the engine fails.
    """
    options = options or MeasureOptions()
    torch.set_num_threads(options.num_threads)
    per_round = 2 * len(options.prompt_tokens) + 1
    total = (options.num_rounds + 1) * per_round
    samples, generator = _Samples(), np.random.default_rng(options.seed)
    bench = _Bench(Path(model_dir), options)
    done = 0
    try:
        for round_index in range(options.num_rounds + 1):
            kept = samples if round_index > 0 else _Samples()  # the first round warms up
            for label, run in bench.arms(kept, generator):
                progress(done, total, label)
                run()
                done += 1
        progress(done, total, "done")
    finally:
        bench.close()
    return EngineMeasurement(
        model=bench.engine.model.name,
        options=options,
        num_prepacked_linears=bench.engine.model.num_prepacked_linears,
        comparisons=_compare(samples, options),
    )


class _Bench:
    """Both models, loaded, and one function for each arm."""

    def __init__(self, folder: Path, options: MeasureOptions) -> None:
        self._options = options
        num_tokens = max(*options.prompt_tokens, _BATCH * _BATCH_PROMPT_TOKENS) * 3
        config = EngineConfig(
            num_blocks=num_tokens // 16, dtype=options.dtype, num_threads=options.num_threads
        )
        model = load_model(folder, config)
        shape = model.cache_shape(config.block_size_tokens)
        num_blocks = config.pool_num_blocks(shape.block_bytes)
        memory = torch.zeros(num_blocks * shape.block_bytes, dtype=torch.uint8)
        cache, pool = PagedCache(shape, memory), BlockPool(num_blocks)
        self.engine = Engine(config, model, cache, pool, clock=SystemClock())
        self._plain = _load_plain(folder, options.dtype)
        self._batch_prompts: list[list[int]] = []
        self._num_requests = 0
        self.engine.start()

    def close(self) -> None:
        self.engine.close()

    def arms(
        self, samples: _Samples, generator: np.random.Generator
    ) -> list[tuple[str, Callable[[], None]]]:
        """Return the arms of one round, in an order that alternates."""
        arms: list[tuple[str, Callable[[], None]]] = []
        for length in self._options.prompt_tokens:
            prompt = self._random_prompt(generator, length)
            arms.append((f"engine, {length} tokens", _bind(self._run_ours, samples, prompt)))
            arms.append((f"plain, {length} tokens", _bind(self._run_plain, samples, prompt)))
        while len(self._batch_prompts) < _BATCH:
            self._batch_prompts.append(self._random_prompt(generator, _BATCH_PROMPT_TOKENS))
        arms.append((f"engine, {_BATCH} at once", lambda: self._run_batch(samples)))
        return arms

    def _random_prompt(self, generator: np.random.Generator, length: int) -> list[int]:
        tokens = generator.integers(0, self.engine.model.vocabulary_size, length)
        return [int(token) for token in tokens]

    def _run_ours(self, samples: _Samples, prompt: list[int]) -> None:
        started_s = time.perf_counter()
        times_s = self._generate([prompt], 1 + _NUM_GAPS)[0]
        _add(samples.ours, f"prefill {len(prompt)}", times_s[0] - started_s)
        _add(samples.ours, f"decode {len(prompt)}", _median_gap(times_s))

    @torch.inference_mode()
    def _run_plain(self, samples: _Samples, prompt: list[int]) -> None:
        started_s = time.perf_counter()
        output = self._plain(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        times_s = [time.perf_counter()]
        for _ in range(_NUM_GAPS):
            output = self._plain(token, past_key_values=output.past_key_values, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            times_s.append(time.perf_counter())
        _add(samples.plain, f"prefill {len(prompt)}", times_s[0] - started_s)
        _add(samples.plain, f"decode {len(prompt)}", _median_gap(times_s))

    def _run_batch(self, samples: _Samples) -> None:
        """Time steps of one sequence and of several; the prompts come from the prefix cache."""
        alone = self._generate(self._batch_prompts[:1], 2 + _NUM_GAPS)
        together = self._generate(self._batch_prompts, 2 + _NUM_GAPS)
        _add(samples.plain, "batch", _median_gap(alone[0][1:]) * len(together))
        _add(samples.ours, "batch", _median_gap(together[0][1:]))

    def _generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[float]]:
        """Return when each token of each prompt came, in seconds."""
        inbox: queue.SimpleQueue[tuple[int, float, TokenOutput]] = queue.SimpleQueue()
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            self._num_requests += 1
            request = EngineRequest(
                request_id=RequestId(f"measure-{self._num_requests}"),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
            )
            self.engine.submit(request, _stamp(inbox, index))
        times_s: list[list[float]] = [[] for _ in prompts]
        num_open = len(prompts)
        while num_open:
            index, at_s, output = inbox.get(timeout=_TOKEN_TIMEOUT_S)
            if output.error is not None:
                raise EngineError(output.error)
            times_s[index].append(at_s)
            num_open -= output.finish_reason is not None
        return times_s


def _stamp(
    inbox: queue.SimpleQueue[tuple[int, float, TokenOutput]], index: int
) -> Callable[[TokenOutput], None]:
    return lambda output: inbox.put((index, time.perf_counter(), output))


def _bind(
    run: Callable[[_Samples, list[int]], None], samples: _Samples, prompt: list[int]
) -> Callable[[], None]:
    return lambda: run(samples, prompt)


def _load_plain(folder: Path, dtype: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with quiet_library():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
        )
    return model.eval()


def _add(samples: dict[str, list[float]], name: str, seconds: float) -> None:
    samples.setdefault(name, []).append(seconds)


def _median_gap(times_s: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times_s))


def _compare(samples: _Samples, options: MeasureOptions) -> tuple[Comparison, ...]:
    found = []
    for length in options.prompt_tokens:
        found.append(_comparison(samples, f"prefill {length}", "s", 1.05))
    for length in options.prompt_tokens:
        goal = 0.65 if length <= 1024 else 0.5
        found.append(_comparison(samples, f"decode {length}", "s", goal))
    speedups = [a / b for a, b in zip(samples.plain["batch"], samples.ours["batch"], strict=True)]
    steps_s = statistics.median(samples.ours["batch"])
    alone_s = statistics.median(samples.plain["batch"]) / _BATCH
    found.append(
        Comparison(
            name=f"{_BATCH} sequences at once against one",
            unit="tokens/s",
            ours=_BATCH / steps_s,
            reference=1 / alone_s,
            ratio=statistics.median(speedups),
            ratio_low=min(speedups),
            ratio_high=max(speedups),
            goal=3.5,
            at_most=False,
        )
    )
    return tuple(found)


def _comparison(samples: _Samples, name: str, unit: str, goal: float) -> Comparison:
    ours, plain = samples.ours[name], samples.plain[name]
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    return Comparison(
        name=f"{name} against plain",
        unit=unit,
        ours=statistics.median(ours),
        reference=statistics.median(plain),
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        goal=goal,
        at_most=True,
    )
