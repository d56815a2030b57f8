"""All choices of one answer: from engine outputs to deltas, until each has ended.

Owns the order of things that end a choice: a stop string here, then the engine's abort.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.server.formats import Choice
from kvferry.server.generation import ABORT_TIMEOUT_S, ChoiceOutput, Generation, raise_if_failed
from kvferry.server.output import ChoiceAssembler, Delta


class AnswerAssembly:
    """Collects a generation's outputs into choices."""

    def __init__(
        self,
        generation: Generation,
        assemblers: Sequence[ChoiceAssembler],
        choices: Sequence[Choice],
    ) -> None:
        self._generation = generation
        self._assemblers = assemblers
        self.choices = choices

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(assembler.is_finished for assembler in self._assemblers)

    async def next_deltas(self) -> list[tuple[Choice, Delta]]:
        """Wait for outputs; return what they add, in order, possibly nothing.

        Raises ``EngineError`` if the engine failed a choice or gave it up.
        """
        try:
            outputs = await self._generation.next_outputs(self._timeout_s())
        except TimeoutError:
            return self._give_up_waiting()
        deltas = (self._feed(output) for output in outputs)
        return [added for added in deltas if added is not None]

    def _feed(self, item: ChoiceOutput) -> tuple[Choice, Delta] | None:
        assembler = self._assemblers[item.choice]
        had_stopped = assembler.needs_abort or assembler.is_finished
        if not had_stopped:
            raise_if_failed(item.output)
        delta = assembler.feed(item.output)
        if assembler.needs_abort and not had_stopped and item.output.finish_reason is None:
            self._generation.abort_choice(item.choice)
        if delta is None:
            return None
        return self._add(item.choice, delta)

    def _add(self, index: int, delta: Delta) -> tuple[Choice, Delta]:
        choice = self.choices[index]
        choice.add(delta)
        return choice, delta

    def _timeout_s(self) -> float | None:
        """Bounded only once all that is left is the engine's word that it has stopped."""
        open_ones = [item for item in self._assemblers if not item.is_finished]
        return ABORT_TIMEOUT_S if all(item.needs_abort for item in open_ones) else None

    def _give_up_waiting(self) -> list[tuple[Choice, Delta]]:
        """The engine has not said that it stopped: end without its report."""
        deltas = []
        for index, assembler in enumerate(self._assemblers):
            if not assembler.is_finished:
                delta = assembler.end_without_report()
                deltas.append(self._add(index, delta))
        return deltas
