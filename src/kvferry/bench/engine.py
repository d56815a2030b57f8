"""Measures the engine against the plain model library, in one process and on one thread.

The arms alternate within each round, so that a slow stretch of the machine hits both; what is
reported is the median of the rounds' ratios, with their spread.
"""

from __future__ import annotations

import functools
import itertools
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvferry.bench.report import Report, format_table
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
Times = dict[str, list[float]]
"""Seconds by figure and arm, one entry a round."""

_TOKEN_TIMEOUT_S = 300.0
_BATCH = 8
_BATCH_PROMPT_TOKENS = 512
_NUM_GAPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """What to measure. ``prompt_tokens`` are the lengths of prefill and the contexts of decode."""

    num_rounds: int = 5
    prompt_tokens: tuple[int, ...] = (512, 2048)
    dtype: str = "bfloat16"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComparison:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasurement:
    """Everything that one run found."""

    model: str
    num_prepacked_linears: int
    comparisons: tuple[EngineComparison, ...]

    @property
    def is_met(self) -> bool:
        """Whether every goal is met."""
        return all(comparison.is_met for comparison in self.comparisons)


def measure_engine(
    model_dir: Path | str,
    options: MeasureOptions,
    *,
    progress: Progress = lambda done, total, label: None,
) -> EngineMeasurement:
    """Return prefill, decode and batch figures of the model in ``model_dir``.

    Takes about 15 s a round for a model of 135 million parameters. Raises ``ConfigError`` if the
    model cannot be loaded, ``EngineError`` if the engine fails.
    """
    torch.set_num_threads(1)
    total = (options.num_rounds + 1) * (2 * len(options.prompt_tokens) + 1)
    times: Times = {}
    generator = np.random.default_rng(options.seed)
    bench = _Bench(Path(model_dir), options)
    done = 0
    try:
        for round_index in range(options.num_rounds + 1):
            kept: Times = times if round_index > 0 else {}  # the first round warms up
            for label, run in bench.arms(kept, generator):
                progress(done, total, label)
                run()
                done += 1
        progress(done, total, "done")
    finally:
        bench.engine.close()
    model = bench.engine.model
    return EngineMeasurement(
        model=model.name,
        num_prepacked_linears=model.num_prepacked_linears,
        comparisons=_compare(times, options),
    )


class _Bench:
    """Both models, loaded, and one function for each arm."""

    def __init__(self, folder: Path, options: MeasureOptions) -> None:
        self._options = options
        num_tokens = max(*options.prompt_tokens, _BATCH * _BATCH_PROMPT_TOKENS) * 3
        config = EngineConfig(num_blocks=num_tokens // 16, dtype=options.dtype, num_threads=1)
        model = load_model(folder, config)
        shape = model.cache_shape(config.block_size_tokens)
        num_blocks = config.pool_num_blocks(shape.block_bytes)
        memory = torch.zeros(num_blocks * shape.block_bytes, dtype=torch.uint8)
        cache, pool = PagedCache(shape, memory), BlockPool(num_blocks)
        self.engine = Engine(config, model, cache, pool, clock=SystemClock())
        self._plain = _load_plain(folder, options.dtype)
        self._batch_prompts: list[list[int]] = []
        self._request_numbers = itertools.count()
        self.engine.start()

    def arms(
        self, times: Times, generator: np.random.Generator
    ) -> list[tuple[str, Callable[[], None]]]:
        """Return the arms of one round, in an order that alternates."""
        arms: list[tuple[str, Callable[[], None]]] = []
        for length in self._options.prompt_tokens:
            prompt = self._random_prompt(generator, length)
            for name, run in (("engine", self._run_ours), ("plain", self._run_plain)):
                arms.append((f"{name}, {length} tokens", functools.partial(run, times, prompt)))
        while len(self._batch_prompts) < _BATCH:
            self._batch_prompts.append(self._random_prompt(generator, _BATCH_PROMPT_TOKENS))
        return [*arms, (f"engine, {_BATCH} at once", lambda: self._run_batch(times))]

    def _random_prompt(self, generator: np.random.Generator, length: int) -> list[int]:
        tokens = generator.integers(0, self.engine.model.vocabulary_size, length)
        return [int(token) for token in tokens]

    def _run_ours(self, times: Times, prompt: list[int]) -> None:
        started_s = time.perf_counter()
        token_times_s = self._generate([prompt], 1 + _NUM_GAPS)[0]
        _add(times, f"ours prefill {len(prompt)}", token_times_s[0] - started_s)
        _add(times, f"ours decode {len(prompt)}", _median_gap(token_times_s))

    @torch.inference_mode()
    def _run_plain(self, times: Times, prompt: list[int]) -> None:
        started_s = time.perf_counter()
        output = self._plain(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        token_times_s = [time.perf_counter()]
        for _ in range(_NUM_GAPS):
            output = self._plain(token, past_key_values=output.past_key_values, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            token_times_s.append(time.perf_counter())
        _add(times, f"plain prefill {len(prompt)}", token_times_s[0] - started_s)
        _add(times, f"plain decode {len(prompt)}", _median_gap(token_times_s))

    def _run_batch(self, times: Times) -> None:
        """Time steps of one sequence and of several; the prompts come from the prefix cache."""
        alone = self._generate(self._batch_prompts[:1], 2 + _NUM_GAPS)
        together = self._generate(self._batch_prompts, 2 + _NUM_GAPS)
        _add(times, "one", _median_gap(alone[0][1:]))
        _add(times, "batch", _median_gap(together[0][1:]))

    def _generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[float]]:
        """Return when each token of each prompt came, in seconds."""
        inbox: queue.SimpleQueue[tuple[int, float, TokenOutput]] = queue.SimpleQueue()

        def stamp(index: int, output: TokenOutput) -> None:
            inbox.put((index, time.perf_counter(), output))

        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            request = EngineRequest(
                request_id=RequestId(f"measure-{next(self._request_numbers)}"),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
            )
            self.engine.submit(request, functools.partial(stamp, index))
        times_s: list[list[float]] = [[] for _ in prompts]
        num_open = len(prompts)
        while num_open:
            index, at_s, output = inbox.get(timeout=_TOKEN_TIMEOUT_S)
            if output.error is not None:
                raise EngineError(output.error)
            times_s[index].append(at_s)
            num_open -= output.finish_reason is not None
        return times_s


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


def _add(times: Times, name: str, seconds: float) -> None:
    times.setdefault(name, []).append(seconds)


def _median_gap(times_s: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times_s))


def _compare(times: Times, options: MeasureOptions) -> tuple[EngineComparison, ...]:
    def against_plain(name: str, goal: float) -> EngineComparison:
        ours, plain = times[f"ours {name}"], times[f"plain {name}"]
        return _comparison(f"{name} against plain", "s", ours, plain, goal)

    lengths = options.prompt_tokens
    together = [_BATCH / step_s for step_s in times["batch"]]
    alone = [1 / step_s for step_s in times["one"]]
    batch = f"{_BATCH} sequences at once against one"
    return (
        *(against_plain(f"prefill {length}", 1.05) for length in lengths),
        *(against_plain(f"decode {length}", 0.65 if length <= 1024 else 0.5) for length in lengths),
        _comparison(batch, "tokens/s", together, alone, 3.5),
    )


def _comparison(
    name: str, unit: str, ours: Sequence[float], reference: Sequence[float], goal: float
) -> EngineComparison:
    """Compare round by round. Of times less is better, of rates more."""
    ratios = [a / b for a, b in zip(ours, reference, strict=True)]
    return EngineComparison(
        name=name,
        unit=unit,
        ours=statistics.median(ours),
        reference=statistics.median(reference),
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        goal=goal,
        at_most=unit == "s",
    )


def report_engine(measurement: EngineMeasurement) -> Report:
    """Return a table of medians, the median ratio with its extremes, and the goal."""
    rows = [
        [
            item.name,
            f"{item.ours:.4g}",
            f"{item.reference:.4g}",
            item.unit,
            f"{item.ratio:.3f} [{item.ratio_low:.3f}, {item.ratio_high:.3f}]",
            f"{'≤' if item.at_most else '≥'} {item.goal:g}",
            "met" if item.is_met else "MISSED",
        ]
        for item in measurement.comparisons
    ]
    header = ["figure", "ours", "reference", "unit", "ratio [least, greatest]", "goal", ""]
    return Report("engine", 2, {"measurement": asdict(measurement)}, format_table(header, rows))
