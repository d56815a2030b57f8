"""Groups of options of ``kvferry bench vllm``; each reaches the command as one argument."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import click

from kvferry.bench.vllm_plan import VllmArm, VllmPlan
from kvferry.cli.arm_names import ArmNames
from kvferry.cli.token_counts import TokenCounts
from kvferry.cli.vllm_stage import VllmSettings

_Command = Callable[..., None]
_GIB_OF_A_DEPLOYMENT = 6.3
"""Two instances with a pool of 1 GiB each."""

_PLAN_OPTIONS = (
    click.option(
        "--arms",
        type=ArmNames(VllmArm),
        default=",".join(VllmArm),
        show_default=True,
        help="What to compare.",
    ),
    click.option(
        "--lengths",
        type=TokenCounts(),
        default="64,512,2048,4096",
        show_default=True,
        help="Prompt tokens of handoffs.",
    ),
    click.option(
        "--history", default=2048, show_default=True, help="Tokens of history of second turns."
    ),
    click.option(
        "--new-tokens", default=100, show_default=True, help="New tokens of second turns."
    ),
    click.option(
        "--repeats", default=8, show_default=True, help="Requests of each length and arm."
    ),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        help="Starts of each deployment, where memory does not hold all at once.  "
        "[default: 2, or 1 for one repeat]",
    ),
    click.option("--max-tokens", default=12, show_default=True, help="Tokens of each answer."),
    click.option(
        "--last-token-id", default=40_000, show_default=True, help="Prompts are of ids up to this."
    ),
)
_SETTINGS_OPTIONS = (
    click.option(
        "--vllm",
        "python",
        type=click.Path(exists=True, path_type=Path),
        help="Python of an environment with vLLM and kvferry, or its folder.  "
        "[default: .venv-vllm]",
    ),
    click.option(
        "--model",
        default="smollm2-135m",
        show_default=True,
        help="Bundled model or model folder.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["bfloat16", "float16", "float32"]),
        default="bfloat16",
        show_default=True,
        help="Type of weights and KV.",
    ),
    click.option(
        "--chunk-tokens",
        type=click.IntRange(1),
        help="Prefill computes at most this many tokens a step.  [default: vLLM's]",
    ),
    click.option(
        "--at-once",
        type=click.IntRange(1),
        help="Deployments that exist at a time.  [default: what memory holds]",
    ),
    click.option(
        "--as-is",
        is_flag=True,
        help="Leave vLLM's and NIXL's busy waits alone: for hosts with many free cores.",
    ),
    click.option(
        "--vllm-arguments",
        metavar="TEXT",
        help="Further options of every `vllm serve`, as one text.",
    ),
)


def vllm_plan_options(function: _Command) -> _Command:
    """Add the options of a ``VllmPlan``, which the command gets as ``plan``."""

    @functools.wraps(function)
    def with_plan(
        *,
        arms: tuple[VllmArm, ...],
        lengths: tuple[int, ...],
        history: int,
        new_tokens: int,
        repeats: int,
        rounds: int | None,
        max_tokens: int,
        last_token_id: int,
        **rest: object,
    ) -> None:
        plan = VllmPlan(
            arms=arms,
            lengths_tokens=lengths,
            history_tokens=history,
            new_tokens=new_tokens,
            repeats=repeats,
            rounds=min(2, repeats) if rounds is None else rounds,
            max_tokens=max_tokens,
            first_token_id=min(1_000, last_token_id // 2),
            last_token_id=last_token_id,
        )
        function(plan=plan, **rest)

    return _decorated(with_plan, _PLAN_OPTIONS)


def vllm_settings_options(function: _Command) -> _Command:
    """Add the options of ``VllmSettings``, which the command gets as ``settings``."""

    @functools.wraps(function)
    def with_settings(
        *,
        python: Path | None,
        model: str,
        dtype: str,
        chunk_tokens: int | None,
        at_once: int | None,
        as_is: bool,
        vllm_arguments: str | None,
        **rest: object,
    ) -> None:
        from kvferry.engine.bundled_model import resolve_model

        chunks = () if chunk_tokens is None else ("--max-num-batched-tokens", str(chunk_tokens))
        settings = VllmSettings(
            python=vllm_python(python or Path(".venv-vllm")),
            model_name=model,
            model=str(resolve_model(model)),
            dtype=dtype,
            cores=_two_cores(),
            waits_quietly=not as_is,
            at_once=at_once or deployments_that_fit(_available_gib()),
            arguments=(*chunks, *shlex.split(vllm_arguments or "")),
        )
        function(settings=settings, **rest)

    return _decorated(with_settings, _SETTINGS_OPTIONS)


def vllm_python(path: Path) -> Path:
    """Return the Python at ``path`` or in the environment there. Refuses one without vLLM."""
    python = path / "bin" / "python" if path.is_dir() else path
    # Not resolved: a virtual environment's Python is a link to another one.
    if not (python.is_file() and (python.parent / "vllm").is_file()):
        raise click.UsageError(
            f"there is no vLLM at {path}: name the Python of an environment that has it by --vllm "
            "(scripts/set_up_vllm.sh makes one for CPUs)"
        )
    return python.absolute()


def deployments_that_fit(available_gib: float) -> int:
    """Return how many deployments that much memory holds; at least one is tried."""
    return max(1, int(available_gib / _GIB_OF_A_DEPLOYMENT))


def _available_gib() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) / 2**20


def _two_cores() -> tuple[int, int]:
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[1 % len(cores)]


def _decorated(function: _Command, options: tuple[Callable[[_Command], _Command], ...]) -> _Command:
    for option in reversed(options):
        function = option(function)
    return function
