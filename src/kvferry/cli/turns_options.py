"""Groups of options of ``kvferry bench turns``; each reaches the command as one argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

from kvferry.bench.legs_client import LegsTargets
from kvferry.bench.turns import TurnTargets
from kvferry.bench.turns_plan import Shape, TurnArm, TurnsPlan, growing, with_histories
from kvferry.cli.arm_names import ArmNames
from kvferry.cli.legs_options import legs_options
from kvferry.cli.token_counts import TokenCounts
from kvferry.client.engine_kinds import EngineKind

_Command = Callable[..., None]
_DEFAULTS = {"turns": 6, "first_length": 1024, "turn_tokens": 512, "new_tokens": 100}
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in _DEFAULTS}

picture_option = click.option(
    "--picture",
    "picture_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw TTFT against prompt length into this PNG file; needs the extra `plot`.",
)

_TARGET_OPTIONS = (
    click.option("--url", help="Router of a running deployment; none: start one."),
    click.option(
        "--prefill-url",
        "prefill_urls",
        multiple=True,
        help="Prefill instance of it, started with --enable-dev-endpoints (vLLM: with "
        "VLLM_SERVER_DEV_MODE=1); repeatable, give all.",
    ),
)
_PLAN_OPTIONS = (
    click.option(
        "--arms",
        type=ArmNames(TurnArm),
        default=",".join(TurnArm),
        show_default=True,
        help="Which of them to interleave.",
    ),
    click.option(
        "--turns",
        type=click.IntRange(2),
        help=f"Turns of a conversation.  [default: {_DEFAULTS['turns']}]",
    ),
    click.option(
        "--first-length",
        type=click.IntRange(1),
        help=f"Tokens of its first prompt.  [default: {_DEFAULTS['first_length']}]",
    ),
    click.option(
        "--turn-tokens",
        type=click.IntRange(1),
        help="New tokens of each later turn, beside the answer before it.  "
        f"[default: {_DEFAULTS['turn_tokens']}]",
    ),
    click.option(
        "--histories",
        type=TokenCounts(),
        help="Instead: two-turn conversations, the second with just this history, answer included.",
    ),
    click.option(
        "--new-tokens",
        type=click.IntRange(1),
        help="With --histories: new tokens of the second turn.  "
        f"[default: {_DEFAULTS['new_tokens']}]",
    ),
    click.option(
        "--answer-tokens",
        type=click.IntRange(1),
        default=16,
        show_default=True,
        help="Tokens of each answer.",
    ),
    click.option(
        "--repeats", default=5, show_default=True, help="Conversations of each kind and arm."
    ),
    click.option("--warmups", default=1, show_default=True, help="Further ones that do not count."),
    click.option(
        "--last-token-id", default=40_000, show_default=True, help="Prompts are of ids up to this."
    ),
)


def turn_target_options(function: _Command) -> _Command:
    """Add the options that name a running deployment; the command gets ``targets`` and ``legs``."""

    @functools.wraps(function)
    def with_targets(
        *,
        url: str | None,
        prefill_urls: tuple[str, ...],
        legs: LegsTargets | None,
        **rest: object,
    ) -> None:
        if (url is None) != (not prefill_urls) or (url and legs):
            raise click.UsageError("give both --url and --prefill-url, or neither")
        targets = None
        if legs is not None:
            targets = TurnTargets(router_url=legs.decode_url, prefill_urls=(legs.prefill_url,))
        if url is not None:
            targets = TurnTargets(
                router_url=url.rstrip("/"),
                prefill_urls=tuple(each.rstrip("/") for each in prefill_urls),
            )
        function(targets=targets, legs=legs, **rest)

    return legs_options(EngineKind.VLLM)(_decorated(with_targets, _TARGET_OPTIONS))


def turns_plan_options(function: _Command) -> _Command:
    """Add the options of a ``TurnsPlan``; the command gets ``plan`` and ``histories``, or None."""

    @functools.wraps(function)
    def with_plan(
        *,
        arms: tuple[TurnArm, ...],
        turns: int | None,
        first_length: int | None,
        turn_tokens: int | None,
        histories: tuple[int, ...] | None,
        new_tokens: int | None,
        answer_tokens: int,
        repeats: int,
        warmups: int,
        last_token_id: int,
        **rest: object,
    ) -> None:
        lengths = {
            "turns": turns,
            "first_length": first_length,
            "turn_tokens": turn_tokens,
            "new_tokens": new_tokens,
        }
        plan = TurnsPlan(
            arms=arms,
            shapes=_shapes(lengths, histories, answer_tokens),
            repeats=repeats,
            warmups=warmups,
            first_token_id=min(1_000, last_token_id // 2),
            last_token_id=last_token_id,
        )
        function(plan=plan, histories=histories, **rest)

    return _decorated(with_plan, _PLAN_OPTIONS)


def _shapes(
    lengths: dict[str, int | None], histories: tuple[int, ...] | None, answer_tokens: int
) -> tuple[Shape, ...]:
    strangers = ["new_tokens"] if histories is None else ["turns", "first_length", "turn_tokens"]
    for name in strangers:
        if lengths[name] is not None:
            told = "needs" if histories is None else "does not go with"
            raise click.UsageError(f"{_FLAGS[name]} {told} --histories")
    sure = {name: lengths[name] or default for name, default in _DEFAULTS.items()}
    if histories is not None:
        return with_histories(histories, new_tokens=sure["new_tokens"], answer_tokens=answer_tokens)
    return growing(
        num_turns=sure["turns"],
        first_tokens=sure["first_length"],
        turn_tokens=sure["turn_tokens"],
        answer_tokens=answer_tokens,
    )


def _decorated(function: _Command, options: tuple[Callable[[_Command], _Command], ...]) -> _Command:
    for option in reversed(options):
        function = option(function)
    return function
