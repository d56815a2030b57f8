"""The engine's thread, and what may go wrong around it; forwards are made up or tiny."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RetentionLimits, RetentionTable
from kvferry.clock import SystemClock
from kvferry.engine.config import EngineConfig
from kvferry.engine.live_request import Chunk
from kvferry.engine.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from kvferry.engine.runner import Engine, draw_seed
from kvferry.engine.sampler import Scores
from kvferry.engine.scheduler import Scheduler
from kvferry.errors import ConfigError, EngineError, RequestError
from kvferry.protocol.ids import BlockHash, RequestId, TransferId
from kvferry.protocol.params import KvTransferParams, Role
from tests.support.fake_clock import FakeClock
from tests.support.tiny_model import TINY_EOS_TOKEN_ID, TINY_VOCABULARY_SIZE
from tests.unit.engine.rig import TIMEOUT_S, Answer, Rig


class ScriptedForward:
    """Always predicts the same token; can be stopped before a step, and can fail."""

    def __init__(self, token_id: int = 5) -> None:
        self.token_id = token_id
        self.num_failures = 0
        self.may_run = threading.Event()
        self.may_run.set()
        self.has_begun = threading.Event()
        self.num_calls = 0

    def __call__(self, chunks: Sequence[Chunk], /) -> list[Scores]:
        self.num_calls += 1
        self.has_begun.set()
        assert self.may_run.wait(TIMEOUT_S)
        if self.num_failures > 0:
            self.num_failures -= 1
            raise RuntimeError("the forward broke")
        scores = np.zeros(TINY_VOCABULARY_SIZE, dtype=np.float32)
        scores[self.token_id] = 9.0
        return [scores for chunk in chunks if chunk.samples]


class ScriptedRig(Rig):
    """A rig whose engine computes nothing."""

    def __init__(self, folder: Path, **options: int) -> None:
        self.forward = ScriptedForward()
        super().__init__(folder, forward=self.forward, has_connector=False, **options)


def test_finish_reasons(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir) as rig:
        answer = rig.submit([9], max_tokens=3).wait()
        assert (answer.tokens, answer.reason) == ([5, 5, 5], FinishReason.LENGTH)
        assert answer.outputs[-1].stop_token_id is None
        answer = rig.submit([9], max_tokens=3, stop_token_ids=(5,)).wait()
        assert (answer.tokens, answer.reason) == ([5], FinishReason.STOP)
        assert answer.outputs[-1].stop_token_id == 5
        answer = rig.submit([9], max_tokens=3, stop_token_ids=(5,), min_tokens=2).wait()
        assert answer.reason is FinishReason.STOP
        assert len(answer.tokens) == 3
        assert 5 not in answer.tokens[:2], "suppressed until min_tokens"


def test_eos_ends_unless_ignored(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir) as rig:
        rig.forward.token_id = TINY_EOS_TOKEN_ID
        answer = rig.submit([9], max_tokens=3, ignore_eos=False).wait()
        assert (answer.tokens, answer.reason) == ([TINY_EOS_TOKEN_ID], FinishReason.STOP)
        assert rig.submit([9], max_tokens=3).wait().reason is FinishReason.LENGTH


def test_without_max_tokens_the_context_is_the_end(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir) as rig:
        rig.engine.close()
    rig = ScriptedRig(tiny_model_dir, max_model_len=40)
    with rig:
        assert len(rig.submit([9] * 30).wait().tokens) == 10


def test_reports_and_logprobs(tiny_model_dir: Path) -> None:
    with Rig(tiny_model_dir) as rig:
        answer = rig.submit(range(3, 43), max_tokens=2, logprobs=2, seed=1).wait()
        report = answer.outputs[-1].report
        assert report is not None
        assert (report.num_prompt_tokens, report.num_computed_prompt_tokens) == (40, 40)
        assert report.arrived_s is not None
        assert report.prefill_end_s is not None
        assert report.first_token_s is not None
        assert report.arrived_s <= report.prefill_end_s <= report.first_token_s
        for output in answer.outputs:
            assert output.logprob is not None
            assert output.logprob.top[0] == (output.token_id, output.logprob.logprob)
            assert len(output.logprob.top) == 2
        assert answer.outputs[0].report is None


def _num_cached(answer: Answer) -> int:
    report = answer.outputs[-1].report
    assert report is not None
    return report.num_cached_tokens


def test_a_reset_forgets_earlier_prompts_and_ends_nobody(tiny_model_dir: Path) -> None:
    prompt = range(3, 43)
    with Rig(tiny_model_dir) as rig:
        first = rig.submit(prompt, max_tokens=2).wait()
        assert _num_cached(rig.submit(prompt, max_tokens=2).wait()) > 0
        running = rig.submit(prompt, max_tokens=100)
        running.wait_tokens(1)
        reset = rig.engine.reset_prefix_cache()
        assert (reset.num_conversations, reset.num_retained_blocks) == (1, 3)
        assert reset.num_cached_blocks >= reset.num_retained_blocks
        assert 3 <= reset.num_blocks_in_use <= 9, "those of the one that runs, however far it is"
        again = rig.engine.reset_prefix_cache()
        assert again.num_cached_blocks == again.num_conversations == 0
        after = rig.submit(prompt, max_tokens=2).wait()
        assert _num_cached(after) == 0
        assert after.tokens == first.tokens
        assert running.wait().tokens[:2] == first.tokens


def test_abort_at_every_point(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir, max_num_sequences=1) as rig:
        rig.forward.may_run.clear()
        running = rig.submit([9] * 20, max_tokens=400)
        assert rig.forward.has_begun.wait(TIMEOUT_S)
        waiting = rig.submit([9] * 20, max_tokens=400)
        for answer in (waiting, running, waiting, running):
            rig.engine.abort(answer.request_id)
        rig.forward.may_run.set()
        assert waiting.wait().reason is FinishReason.ABORT
        assert running.wait().reason is FinishReason.ABORT
        assert waiting.tokens == []
        rig.engine.abort(running.request_id)
        rig.engine.abort(RequestId("never seen"))
        assert rig.submit([9], max_tokens=1).wait().reason is FinishReason.LENGTH


def test_a_request_id_is_free_again_after_the_end(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir) as rig:
        request = EngineRequest(request_id=RequestId("same"), prompt_token_ids=(9,))
        rig.forward.may_run.clear()
        first = Answer(request.request_id)
        rig.engine.submit(request, first)
        with pytest.raises(RequestError, match="in use"):
            rig.engine.submit(request, Answer(request.request_id))
        rig.engine.abort(request.request_id)
        rig.forward.may_run.set()
        first.wait()
        again = Answer(request.request_id)
        rig.engine.submit(request, again)
        rig.engine.abort(request.request_id)
        assert again.wait().reason is FinishReason.ABORT


def test_a_failed_step_ends_its_requests_only(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir) as rig:
        rig.forward.num_failures = 1
        answer = rig.submit([9] * 40, max_tokens=3).wait()
        assert answer.reason is FinishReason.ERROR
        assert "the forward broke" in (answer.outputs[-1].error or "")
        snapshot = rig.engine.snapshot()
        assert rig.engine.failure is None
        assert snapshot.pool.num_cached == 0, "nothing of a failed step is found again"
        assert rig.submit([9] * 40, max_tokens=3).wait().reason is FinishReason.LENGTH


def test_repeated_failures_are_final_and_shown(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir, max_num_sequences=1) as rig:
        rig.forward.num_failures = 3
        rig.forward.may_run.clear()
        answers = [rig.submit([9], max_tokens=3) for _ in range(5)]
        rig.forward.may_run.set()
        assert {answer.wait().reason for answer in answers} == {FinishReason.ERROR}
        assert "3 steps in a row" in (rig.engine.failure or "")
        with pytest.raises(EngineError, match="3 steps in a row"):
            rig.submit([9], max_tokens=3)


def test_a_callback_that_raises_ends_only_its_own_request(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs: list[TokenOutput] = []

    def on_output(output: TokenOutput) -> None:
        outputs.append(output)
        raise ValueError("the client's queue is gone")

    with ScriptedRig(tiny_model_dir) as rig:
        request = EngineRequest(request_id=RequestId("bad"), prompt_token_ids=(9,))
        rig.forward.may_run.clear()
        rig.engine.submit(request, on_output)
        good = rig.submit([9, 9], max_tokens=5)
        rig.forward.may_run.set()
        assert len(good.wait().tokens) == 5
        assert [output.finish_reason for output in outputs] == [None, FinishReason.ABORT]
        assert "bad" in caplog.text


def test_close_ends_what_is_left(tiny_model_dir: Path) -> None:
    rig = ScriptedRig(tiny_model_dir, max_num_sequences=1)
    with rig:
        rig.forward.may_run.clear()
        answers = [rig.submit([9], max_tokens=400) for _ in range(3)]
        assert rig.forward.has_begun.wait(TIMEOUT_S)
        closing = threading.Thread(target=rig.engine.close)
        closing.start()
        rig.forward.may_run.set()
        closing.join(TIMEOUT_S)
        assert {answer.wait().reason for answer in answers} == {FinishReason.ABORT}
        with pytest.raises(EngineError, match="shutting down"):
            rig.submit([9])
        rig.engine.close()


def test_an_idle_engine_takes_no_step(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir) as rig:
        rig.submit([9], max_tokens=2).wait()
        before = rig.forward.num_calls
        rig.engine.wake()
        rig.submit([9], max_tokens=1).wait()
        assert rig.forward.num_calls == before + 1


def test_an_idle_engine_shows_no_retention_past_its_time(tiny_model_dir: Path) -> None:
    clock, rig = FakeClock(), Rig(tiny_model_dir, num_blocks=10)
    pool = BlockPool(10)
    retention = RetentionTable(pool, clock, RetentionLimits(duration_s=60))
    engine = Engine(rig.config, rig.engine.model, rig.cache, pool, retention=retention, clock=clock)
    hashes = [BlockHash(bytes([number]) * 32) for number in range(2)]
    blocks = pool.allocate(2)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.drop(blocks)
    retention.retain(hashes)
    shown = engine.snapshot()
    assert (shown.num_conversations, shown.pool.num_retained) == (1, 2)
    clock.advance(60)
    shown = engine.snapshot()
    assert (shown.num_conversations, shown.pool.num_retained) == (0, 0)
    ends = {reason: count for reason, count in shown.retention_ends.items() if count}
    assert ends == {"expired": 1}


def test_random_submits_and_aborts_from_several_threads(tiny_model_dir: Path) -> None:
    answers: list[Answer] = []

    def client(rig: ScriptedRig, seed: int) -> None:
        source = random.Random(seed)
        for index in range(40):
            request = EngineRequest(
                request_id=RequestId(f"{seed}-{index}"),
                prompt_token_ids=(9,) * source.randint(1, 80),
                sampling=SamplingParams(
                    temperature=0.0, max_tokens=source.randint(1, 40), ignore_eos=True
                ),
            )
            answer = Answer(request.request_id)
            answers.append(answer)
            rig.engine.submit(request, answer)
            if source.random() < 0.5:
                rig.engine.abort(source.choice(answers).request_id)

    with ScriptedRig(tiny_model_dir, num_blocks=12) as rig:
        threads = [threading.Thread(target=client, args=(rig, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        reasons = {answer.wait().reason for answer in answers}
        assert len(answers) == 160
        assert reasons == {FinishReason.LENGTH, FinishReason.ABORT}
        assert rig.engine.failure is None


def test_queues_out_of_order_still_end_every_request(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler, request: object) -> None:
        raise RuntimeError("the queues are not in order")

    rig = ScriptedRig(tiny_model_dir)
    rig.engine.start()
    rig.forward.may_run.clear()
    answers = [rig.submit([9], max_tokens=1) for _ in range(3)]
    monkeypatch.setattr(Scheduler, "remove", broken)
    rig.forward.may_run.set()
    assert {answer.wait().reason for answer in answers} == {FinishReason.ERROR}
    assert "not in order" in (rig.engine.failure or "")
    rig.engine.close()


def test_limits_at_submit(tiny_model_dir: Path) -> None:
    with ScriptedRig(tiny_model_dir, num_blocks=4, max_model_len=100) as rig:
        with pytest.raises(RequestError, match=r"context is 100 tokens.*100 tokens"):
            rig.submit([9] * 100)
        with pytest.raises(RequestError, match=r"needs 5 KV blocks.*has 4"):
            rig.submit([9] * 65)
        role = KvTransferParams(transfer_id=TransferId("t"), role=Role.PREFILL)
        with pytest.raises(RequestError, match="exchanges KV"):
            rig.submit([9], transfer=role)
        assert rig.engine.snapshot().num_waiting == 0


def test_a_pool_beyond_its_memory_is_refused(tiny_model_dir: Path) -> None:
    rig = Rig(tiny_model_dir, num_blocks=4)
    with pytest.raises(ConfigError, match=r"5 blocks.*only 4"):
        Engine(EngineConfig(), rig.engine.model, rig.cache, BlockPool(5), clock=SystemClock())
    rig.engine.close()


def test_seeds_differ_and_fit_a_json_number() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert max(seeds) < 2**53
