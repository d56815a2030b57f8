"""What turns have cost: record, tables, and a picture of TTFT against prompt length.

Measures nothing; matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.bench.report import (
    Estimate,
    Groups,
    Place,
    Report,
    Summary,
    as_fields,
    format_interval,
    format_table,
    median_difference,
    ms,
    paired_ratio,
    sample_fields,
    summarise,
    values,
)
from kvferry.bench.turns import TurnArm, TurnSample
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    # Imported when something is drawn: the command line starts without it.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COPIES_ALLOWED = 1.5
ALLOWED_S = 0.005
"""A turn with read-back may take that many plain copies of its bytes and this longer than warm."""
_SPREAD = ("ttft_s", "read_back_s", "compute_s")
_COUNTED = (
    "num_cached_tokens",
    "num_read_back_tokens",
    "num_read_back_bytes",
    "num_computed_tokens",
)
_PLACE = {"conversation": "", "turn": "", "num_history_tokens": "history", "num_new_tokens": "new"}
_MEDIANS_LEGEND = (
    "median (interquartile range); reading, computing: prefill's time; cached (by prefill itself), "
    "read back, computed (by prefill): tokens of the prompt"
)
_COMPARISONS_LEGEND = (
    "ratios of median TTFTs and difference of medians, [95 % interval]; limit of the difference: "
    f"{COPIES_ALLOWED:g} plain copies of the bytes that were read back, and {ms(ALLOWED_S)} ms"
)
_ANSWERS_LEGEND = (
    "answers to the same prompts; in float32 they are the same, in bfloat16 near ties may differ"
)


def _groups(samples: Sequence[TurnSample]) -> Groups[TurnSample]:
    """Return the turns that have a history, by where they are in their conversation."""
    return Groups([sample for sample in samples if sample.num_history_tokens], _PLACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnComparison:
    """A read-back arm against the others, at one turn. None: an arm was not run, or no ratio."""

    place: Place
    arm: TurnArm
    over_warm: Estimate | None
    recompute_over: Estimate | None
    less_warm_s: Estimate | None
    limit_s: float | None
    """What the difference to warm may be; None: nothing was read back."""


def compare_turns(samples: Sequence[TurnSample], rng: random.Random) -> list[TurnComparison]:
    """Return each read-back arm against warm and recompute, turn by turn."""
    groups = _groups(samples)
    found = []
    for place, _, own in groups.groups():
        arm = own[0].arm
        if not arm.reads_back:
            continue
        warm, recompute = (groups.at(place, other) for other in (TurnArm.WARM, TurnArm.RECOMPUTE))
        ours_s, warm_s, recompute_s = (values(side, "ttft_s") for side in (own, warm, recompute))
        copies_s = [s.plain_copy_s for s in own if s.plain_copy_s is not None]
        found.append(
            TurnComparison(
                place=place,
                arm=arm,
                over_warm=paired_ratio(ours_s, warm_s, rng) if warm else None,
                recompute_over=paired_ratio(recompute_s, ours_s, rng) if recompute else None,
                less_warm_s=median_difference(ours_s, warm_s, rng) if warm else None,
                limit_s=COPIES_ALLOWED * statistics.median(copies_s) + ALLOWED_S
                if copies_s
                else None,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """An arm's answers beside another's to the same prompts."""

    arm: TurnArm
    reference: TurnArm
    num_compared: int
    different: tuple[TurnSample, ...]
    """Those of ``arm`` that are not the same."""

    @property
    def num_same(self) -> int:
        """How many are the same."""
        return self.num_compared - len(self.different)


def check_answers(samples: Sequence[TurnSample]) -> list[AnswerCheck]:
    """Compare each arm's answers with those of the arms before it that read nothing back.

    An answer is part of the next prompt, so what follows a different one is not compared.
    """
    held: dict[TurnArm, dict[tuple[int, int], list[TurnSample]]] = {}
    for sample in sorted(samples, key=lambda sample: sample.turn):
        key = (sample.repeat, sample.conversation)
        held.setdefault(sample.arm, {}).setdefault(key, []).append(sample)
    arms = [arm for arm in TurnArm if arm in held]
    return [
        _check(arm, held[arm], reference, held[reference])
        for number, reference in enumerate(arms)
        for arm in arms[number + 1 :]
        if not reference.reads_back or number == 0
    ]


def _check(
    arm: TurnArm,
    ours: Mapping[tuple[int, int], list[TurnSample]],
    reference: TurnArm,
    theirs: Mapping[tuple[int, int], list[TurnSample]],
) -> AnswerCheck:
    num_compared = 0
    different: list[TurnSample] = []
    for key in sorted(ours):
        for mine, other in zip(ours[key], theirs.get(key, []), strict=False):
            num_compared += 1
            if mine.answer != other.answer:
                different.append(mine)
                break
    return AnswerCheck(
        arm=arm, reference=reference, num_compared=num_compared, different=tuple(different)
    )


def report_turns(samples: Sequence[TurnSample], rng: random.Random) -> Report:
    """Return the medians of every turn with a history, comparisons, answers and raw samples."""
    groups, comparisons, checks = (
        _groups(samples),
        compare_turns(samples, rng),
        check_answers(samples),
    )
    text = [_medians_table(groups), _MEDIANS_LEGEND]
    if comparisons:
        text += [_comparisons_table(groups, comparisons), _COMPARISONS_LEGEND]
    if checks:
        text += [_answers_table(checks), _ANSWERS_LEGEND]
    fields = {
        "summaries": [
            summary | _counts(found)
            for summary, (_, _, found) in zip(
                groups.summaries(_SPREAD), groups.groups(), strict=True
            )
        ],
        "comparisons": [
            {
                **groups.place_fields(item.place),
                "arm": item.arm.value,
                "over_warm": as_fields(item.over_warm),
                "recompute_over": as_fields(item.recompute_over),
                "less_warm_s": as_fields(item.less_warm_s),
                "limit_s": item.limit_s,
            }
            for item in comparisons
        ],
        "answers": [_check_fields(check) for check in checks],
        "samples": [sample_fields(sample) for sample in samples],
    }
    return Report("turns", 1, fields, "\n\n".join(text))


def _counts(found: list[TurnSample]) -> dict[str, object]:
    return {
        "num_turns_read_back": sum(sample.num_read_back_tokens > 0 for sample in found),
        "outcomes": _outcomes(found),
        **{name: statistics.median(values(found, name)) for name in _COUNTED},
    }


def _outcomes(samples: Sequence[TurnSample]) -> dict[str, int]:
    outcomes = [sample.outcome for sample in samples if sample.outcome]
    return {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}


def _check_fields(check: AnswerCheck) -> dict[str, object]:
    places = ("repeat", "conversation", "turn")
    return {
        "arm": check.arm.value,
        "reference": check.reference.value,
        "num_compared": check.num_compared,
        "num_same": check.num_same,
        "different": [{n: getattr(sample, n) for n in places} for sample in check.different],
    }


def _medians_table(groups: Groups[TurnSample]) -> str:
    def outcomes(found: list[TurnSample]) -> str:
        return ", ".join(f"{count} {name}" for name, count in _outcomes(found).items()) or "-"

    further = {
        "reading ms": lambda found: ms(statistics.median(values(found, "read_back_s"))),
        "computing ms": lambda found: ms(statistics.median(values(found, "compute_s"))),
        "cached": lambda found: f"{statistics.median(values(found, 'num_cached_tokens')):.0f}",
        "read back": lambda found: (
            f"{statistics.median(values(found, 'num_read_back_tokens')):.0f}"
        ),
        "computed": lambda found: f"{statistics.median(values(found, 'num_computed_tokens')):.0f}",
        "outcomes": outcomes,
    }
    return groups.medians_table({"ttft_s": "TTFT"}, further)


def _comparisons_table(groups: Groups[TurnSample], comparisons: Sequence[TurnComparison]) -> str:
    header = ["history", "new", "arm", "arm / warm", "recompute / arm", "arm less warm ms"]
    rows = [
        [
            *groups.cells(item.place),
            item.arm.value,
            format_interval(item.over_warm, "{:.3f}".format),
            format_interval(item.recompute_over, "{:.1f}".format),
            format_interval(item.less_warm_s),
            "-" if item.limit_s is None else ms(item.limit_s),
        ]
        for item in comparisons
    ]
    return format_table([*header, "limit ms"], rows)


def _answers_table(checks: Sequence[AnswerCheck]) -> str:
    rows = [
        [check.arm.value, check.reference.value, str(check.num_compared), str(check.num_same)]
        for check in checks
    ]
    return format_table(["answers of", "beside those of", "compared", "the same"], rows)


Curve = list[tuple[int, Summary]]
"""TTFT in seconds by prompt length in tokens, shortest first."""
_SIZE_INCHES = (8.0, 4.8)
_DOTS_PER_INCH = 150
_INK, _FAINT, _GRID = "#222222", "#666666", "#e4e4e4"
_LOOKS = {
    # Colours that people who see few of them can still tell apart, by brightness and by mark.
    TurnArm.RECOMPUTE: ("recompute: reuse off", "#8a8a8a", "o", "-"),
    TurnArm.WARM: ("warm: prefill kept its cache", "#009e73", "s", "--"),
    TurnArm.READ_BACK: ("read-back: reuse on", "#0072b2", "^", "-"),
    TurnArm.READ_BACK_PUSH: ("read-back + push: reuse on", "#d55e00", "D", "-"),
}


def ttft_curves(samples: Sequence[TurnSample]) -> dict[TurnArm, Curve]:
    """Return each arm's TTFT against prompt length."""
    curves: dict[TurnArm, Curve] = {}
    for _, _, found in Groups(samples, {"conversation": "", "turn": ""}).groups():
        length = round(statistics.median(values(found, "num_prompt_tokens")))
        curves.setdefault(found[0].arm, []).append((length, summarise(values(found, "ttft_s"))))
    return {arm: sorted(curves[arm], key=lambda p: p[0]) for arm in TurnArm if arm in curves}


def require_drawing() -> None:
    """Raise ``ConfigError`` if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture needs matplotlib, which the extra `plot` installs: pip install "
            "'kvferry[plot]'"
        )


def draw_ttft(samples: Sequence[TurnSample], path: Path, *, subtitle: str) -> None:
    """Write the PNG ``path``, whole or not at all. Raises ``ConfigError`` if it cannot."""
    require_drawing()
    figure = ttft_figure(ttft_curves(samples), subtitle)
    draft = path.with_name(path.name + ".draft")
    try:
        figure.savefig(draft, format="png")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def ttft_figure(curves: Mapping[TurnArm, Curve], subtitle: str) -> Figure:
    """Return the drawing: a line of medians for each arm, with a band from quartile to quartile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for arm, curve in curves.items():
        label, colour, mark, line = _LOOKS[arm]
        lengths, spreads = zip(*curve, strict=True)
        lower, median, upper = (
            [1e3 * getattr(spread, name) for spread in spreads] for name in ("p25", "median", "p75")
        )
        axes.fill_between(lengths, lower, upper, color=colour, alpha=0.15, linewidth=0)
        axes.plot(
            lengths,
            median,
            color=colour,
            marker=mark,
            markersize=5,
            linestyle=line,
            linewidth=1.8,
            label=label,
        )
    _dress(axes, subtitle)
    return figure


def _dress(axes: Axes, subtitle: str) -> None:
    axes.set_title("Time to first token of a conversation's turns", loc="left", color=_INK, pad=22)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=8.5, color=_FAINT)
    axes.set_xlabel("prompt length (tokens, history included)", color=_INK)
    axes.set_ylabel("time to first token (ms)", color=_INK)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_FAINT, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    legend = axes.legend(loc="upper left", labelcolor=_INK, framealpha=1)
    legend.get_frame().set_edgecolor("none")
