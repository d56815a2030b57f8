"""``kvferry bench``: the group of measurements, one file each."""

from __future__ import annotations

from kvferry.cli.lazy_group import LazyCommand, LazyGroup

bench = LazyGroup(
    name="bench",
    help_text="""Measure handoffs, turns, vLLM, the engine, transfers.

    Arms are interleaved and medians shown with their spread; --json keeps every sample.
    """,
    lazy={
        "handoff": LazyCommand(
            "kvferry.cli.bench_handoff", "handoff", "What a handoff adds to a request."
        ),
        "turns": LazyCommand(
            "kvferry.cli.bench_turns", "turns", "A conversation's turns, with and without reuse."
        ),
        "vllm": LazyCommand(
            "kvferry.cli.bench_vllm", "vllm", "vLLM's own connectors against ours, on this machine."
        ),
        "engine": LazyCommand(
            "kvferry.cli.bench_engine", "engine", "The engine against plain transformers."
        ),
        "transfer": LazyCommand(
            "kvferry.cli.bench_transfer", "transfer", "Moving blocks against one plain copy."
        ),
    },
)
