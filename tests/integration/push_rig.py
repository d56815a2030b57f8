"""Two engines on a tiny model in one process, joined by real exchanges over shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.blocks.pool import BlockPool
from kvferry.clock import SystemClock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.exchange import Exchange, ExchangeMemory
from kvferry.connector.ports import ConnectorSnapshot
from kvferry.engine.config import EngineConfig
from kvferry.engine.core import Forward
from kvferry.engine.forward import ModelForward
from kvferry.engine.live_request import Chunk
from kvferry.engine.model import load_model
from kvferry.engine.paged_cache import PagedCache
from kvferry.engine.request import EngineRequest, SamplingParams
from kvferry.engine.runner import Engine
from kvferry.engine.sampler import Scores
from kvferry.observe.metrics import Metrics
from kvferry.protocol.ids import Epoch, InstanceId, RequestId, TransferId
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import KvTransferParams, Mode, OnFailure, Role
from kvferry.transport.base import MemoryRegion, Transport
from kvferry.transport.registry import create_transport
from tests.support.block_integrity import assert_whole
from tests.support.tiny_model import TINY_VOCABULARY_SIZE
from tests.unit.engine.rig import Answer

WAIT_S = 20.0
CHUNK_TOKENS = 32


class GatedForward:
    """A forward that a test lets through step by step; open at first."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self._changed = threading.Condition()
        self._num_allowed: float = float("inf")
        self.num_done = 0

    def __call__(self, chunks: Sequence[Chunk], /) -> Iterable[Scores]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_allowed >= 1, WAIT_S)
            self._num_allowed -= 1
        scores = list(self.forward(chunks))
        with self._changed:
            self.num_done += 1
            self._changed.notify_all()
        return scores

    def allow(self, num_steps: float) -> None:
        """Let only so many steps through from now on."""
        with self._changed:
            self._num_allowed = num_steps
            self._changed.notify_all()

    def wait_used_up(self) -> None:
        """Wait until every step that was let through is computed."""
        with self._changed:
            done = self.num_done + self._num_allowed
            assert self._changed.wait_for(lambda: self.num_done >= done, WAIT_S)


class Side:
    """One engine and its exchange."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        exchange: dict[str, Any] | None = None,
        transport: Transport | None = None,
        **options: Any,  # noqa: ANN401 - EngineConfig's
    ) -> None:
        defaults = {
            "num_blocks": 128,
            "prefill_chunk_tokens": CHUNK_TOKENS,
            "num_threads": 1,
            "dtype": "float32",
        }
        config = EngineConfig(**{**defaults, **options})
        model = load_model(folder, config)
        shape = model.cache_shape(config.block_size_tokens)
        num_blocks = config.pool_num_blocks(shape.block_bytes)
        self.block_bytes = shape.block_bytes
        self.transport = transport or create_transport("shm")
        view = self.transport.allocate(num_blocks * shape.block_bytes)
        self.memory = np.frombuffer(view, dtype=np.uint8)
        cache = PagedCache(shape, view)
        regions = [MemoryRegion(cache.address, shape.block_bytes, shape.block_bytes, num_blocks)]
        self.transport.register(regions)
        self.pool = BlockPool(num_blocks)
        self.exchange = Exchange(
            ExchangeConfig(instance_id=InstanceId(name), epoch=Epoch(1), **(exchange or {})),
            ExchangeMemory(
                self.pool, model.layout(config.block_size_tokens), self.transport, regions
            ),
            SystemClock(),
            Metrics().exchange,
        )
        self.gate = GatedForward(ModelForward(model, cache))
        self.engine = Engine(
            config, model, cache, self.pool, connector=self.exchange.port, clock=SystemClock(),
            forward=self.gate,
        )  # fmt: skip
        self.exchange.start(self.engine.wake)
        self.engine.start()
        self.name = name
        self._num_requests = 0

    def submit(
        self,
        prompt: Sequence[int],
        transfer: KvTransferParams | None = None,
        *,
        salt: str = "",
        **sampling: Any,  # noqa: ANN401 - SamplingParams'
    ) -> Answer:
        self._num_requests += 1
        answer = Answer(RequestId(f"{self.name}-{self._num_requests}"))
        request = EngineRequest(
            request_id=answer.request_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling}),
            transfer=transfer,
            cache_salt=salt,
        )
        self.engine.submit(request, answer)
        return answer

    def send(
        self,
        prompt: Sequence[int],
        transfer_id: str,
        **sampling: Any,  # noqa: ANN401 - SamplingParams'
    ) -> Answer:
        """Submit a push's prefill leg."""
        transfer = KvTransferParams(
            transfer_id=TransferId(transfer_id), role=Role.PREFILL, mode=Mode.PUSH
        )
        return self.submit(prompt, transfer, **sampling)

    def take_from(
        self,
        peer: Side,
        prompt: Sequence[int],
        transfer_id: str,
        *,
        on_failure: OnFailure = OnFailure.RECOMPUTE,
        **sampling: Any,  # noqa: ANN401 - SamplingParams'
    ) -> Answer:
        """Submit a push's decode leg."""
        transfer = KvTransferParams(
            transfer_id=TransferId(transfer_id),
            role=Role.DECODE,
            mode=Mode.PUSH,
            peer=peer.exchange.address,
            on_failure=on_failure,
        )
        return self.submit(prompt, transfer, **sampling)

    def forget(self) -> None:
        """Empty the prefix cache and the memory."""
        self.pool.clear_cache()
        self.memory[:] = 0

    def wait_written(self) -> None:
        """Wait until a peer has written into this side's memory, empty before."""
        wait_until(lambda: bool(self.memory.any()))

    def close(self) -> None:
        self.gate.allow(float("inf"))
        self.engine.close()
        self.exchange.close()
        self.transport.close()


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it did not become true in time")


@contextlib.contextmanager
def sides(folder: Path, *options: dict[str, Any]) -> Iterator[list[Side]]:
    """One side for each of ``options``; all must be whole and idle in the end."""
    with contextlib.ExitStack() as stack:
        made = []
        for number, chosen in enumerate(options):
            side = Side(f"side-{number}", folder, **chosen)
            stack.callback(side.close)
            made.append(side)
        yield made
        wait_whole(*made)


def wait_whole(*all_sides: Side) -> None:
    """Wait until the last messages have arrived and every block is free."""
    idle = ConnectorSnapshot()

    def is_idle(side: Side) -> bool:
        snapshot = dataclasses.replace(side.exchange.port.snapshot(), outcomes={})
        return snapshot == idle and side.pool.num_free == side.pool.num_blocks

    try:
        wait_until(lambda: all(is_idle(side) for side in all_sides))
    except AssertionError as error:
        states = [
            (s.exchange.port.snapshot(), s.pool.num_free, s.pool.num_blocks) for s in all_sides
        ]
        raise AssertionError(str(states)) from error
    for side in all_sides:
        assert_whole(side.pool)


def random_prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, TINY_VOCABULARY_SIZE) for _ in range(length)]


def report_of(answer: Answer) -> KvReport:
    report = answer.outputs[-1].report
    assert report is not None
    return report
