"""In float32 the engine gives the tokens of the plain model library, whatever runs beside."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvferry.connector.ports import ReceiveOutcome  # noqa: E402
from kvferry.engine.model import quiet_library  # noqa: E402
from kvferry.protocol.ids import TransferId  # noqa: E402
from kvferry.protocol.params import KvTransferParams, Role  # noqa: E402
from tests.support.tiny_model import TINY_VOCABULARY_SIZE, make_tiny_model  # noqa: E402
from tests.unit.engine.rig import Answer, Rig  # noqa: E402

pytestmark = pytest.mark.slow

BORDER_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049)
NUM_PROMPTS = 100
NUM_NEW_TOKENS = 8
NUM_AT_ONCE = 8


MODEL_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 100, 255, 256, 257, 300, 511, 512, 513)


class Plain:
    """The unmodified model, greedy, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        with quiet_library():
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="sdpa", dtype=torch.float32
            ).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens: list[int] = []
        feed, cache = torch.tensor([list(prompt)]), None
        for _ in range(num_tokens):
            output = self._model(feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            feed = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(feed))
        return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Plain]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Plain(folder)
    torch.set_num_threads(before)


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(3, TINY_VOCABULARY_SIZE) for _ in range(length)]


def run_at_once(rig: Rig, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Answer]:  # noqa: ANN401
    """Keep `NUM_AT_ONCE` requests in flight until all are answered."""
    answers: list[Answer] = []
    for index, prompt in enumerate(prompts):
        if index >= NUM_AT_ONCE:
            answers[index - NUM_AT_ONCE].wait()
        answers.append(rig.submit(prompt, **sampling))
    return [answer.wait() for answer in answers]


def test_a_hundred_prompts_at_all_borders(folder: Path, plain: Plain) -> None:
    source = random.Random(1)
    lengths = list(BORDER_LENGTHS)
    lengths += [source.randint(1, 3000) for _ in range(NUM_PROMPTS - len(lengths))]
    source.shuffle(lengths)
    prompts = [random_prompt(source, length) for length in lengths]
    expected = [plain.greedy(prompt, NUM_NEW_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > NUM_PROMPTS // 2, "a degenerate model"
    with Rig(folder, num_blocks=1600) as rig:
        answers = run_at_once(rig, prompts, max_tokens=NUM_NEW_TOKENS)
        for length, answer, tokens in zip(lengths, answers, expected, strict=True):
            assert answer.tokens == tokens, f"prompt of {length} tokens"


def test_prefix_cache_hits(folder: Path, plain: Plain) -> None:
    source = random.Random(2)
    history = random_prompt(source, 700)
    prompts = [history[:length] for length in (700, 699, 688, 672, 673, 16, 17, 33, 700)]
    prompts += [history[:half] + random_prompt(source, 40) for half in (100, 256, 512, 640)]
    with Rig(folder) as rig:
        rig.submit(history, max_tokens=4).wait()
        for prompt in prompts:
            answer = rig.submit(prompt, max_tokens=NUM_NEW_TOKENS).wait()
            report = answer.outputs[-1].report
            assert answer.tokens == plain.greedy(prompt, NUM_NEW_TOKENS)
            assert report is not None
            num_shared = sum(a == b for a, b in zip(history, prompt, strict=False))
            shared = min(num_shared, len(prompt) - 1) // 16 * 16
            assert report.num_cached_tokens >= min(shared, 640)
            assert report.num_computed_prompt_tokens == len(prompt) - report.num_cached_tokens
        again = run_at_once(rig, prompts, max_tokens=NUM_NEW_TOKENS)
        for prompt, answer in zip(prompts, again, strict=True):
            assert answer.tokens == plain.greedy(prompt, NUM_NEW_TOKENS)


def test_preemption_in_a_tiny_pool(folder: Path, plain: Plain) -> None:
    source = random.Random(3)
    prompts = [random_prompt(source, length) for length in (60, 90, 33, 120, 17, 64, 100, 80, 48)]
    expected = [plain.greedy(prompt, 64) for prompt in prompts]
    for prefix_caching in (True, False):
        with Rig(folder, num_blocks=24, prefix_caching=prefix_caching) as rig:
            answers = run_at_once(rig, prompts, max_tokens=64)
            assert [answer.tokens for answer in answers] == expected
            assert rig.engine.snapshot().num_preemptions > 0


def test_small_chunks(folder: Path, plain: Plain) -> None:
    source = random.Random(4)
    prompts = [random_prompt(source, length) for length in (1, 16, 17, 50, 100, 257, 90, 33)]
    with Rig(folder, prefill_chunk_tokens=24, max_num_sequences=5) as rig:
        answers = run_at_once(rig, prompts, max_tokens=NUM_NEW_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == plain.greedy(prompt, NUM_NEW_TOKENS)


def test_seeded_sampling_does_not_depend_on_the_batch(folder: Path) -> None:
    source = random.Random(5)
    prompts = [random_prompt(source, source.randint(1, 300)) for _ in range(16)]

    def options(index: int) -> dict[str, Any]:
        return {"seed": index, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "max_tokens": 12}

    with Rig(folder) as rig:
        alone = [rig.submit(p, **options(i)).wait().tokens for i, p in enumerate(prompts)]
    with Rig(folder, num_blocks=90) as rig:
        together = [rig.submit(p, **options(i)) for i, p in enumerate(prompts)]
        assert [answer.wait().tokens for answer in together] == alone
    with Rig(folder) as rig:
        other = [
            rig.submit(p, **{**options(i), "seed": i + 100}).wait().tokens
            for i, p in enumerate(prompts)
        ]
        assert other != alone


def test_handoffs_of_all_border_lengths(folder: Path, plain: Plain) -> None:
    source = random.Random(6)
    prompts = [random_prompt(source, length) for length in BORDER_LENGTHS]
    with Rig(folder) as prefill, Rig(folder, recompute_threshold_tokens=16) as decode:
        for index, prompt in enumerate(prompts):
            transfer_id = TransferId(f"transfer-{index}")
            role = KvTransferParams(transfer_id=transfer_id, role=Role.PREFILL)
            handoff = prefill.submit(prompt, transfer=role).wait().outputs[-1].handoff
            assert handoff is not None
            answer = decode.submit(prompt, transfer=handoff, max_tokens=NUM_NEW_TOKENS)
            if len(prompt) >= 16:
                num_bytes = decode.copy_blocks(prefill, transfer_id)
                decode.connector.finish_receive(transfer_id, ReceiveOutcome.RECEIVED, num_bytes)
            assert answer.wait().tokens == plain.greedy(prompt, NUM_NEW_TOKENS)
            report = answer.outputs[-1].report
            assert report is not None
            assert report.num_received_tokens == (len(prompt) if len(prompt) >= 16 else 0)
            prefill.connector.withdraw(transfer_id)


@pytest.mark.model
@pytest.mark.timeout(300)  # the model may have to be converted first
def test_sixteen_prompts_on_the_bundled_model() -> None:
    from kvferry.engine.bundled_model import bundled_model_dir

    source = random.Random(7)
    folder = bundled_model_dir()
    plain = Plain(folder)
    prompts = [[source.randrange(3, 49_000) for _ in range(length)] for length in MODEL_LENGTHS]
    source.shuffle(prompts)
    with Rig(folder, num_blocks=400) as rig:
        answers = run_at_once(rig, prompts, max_tokens=NUM_NEW_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == plain.greedy(prompt, NUM_NEW_TOKENS)
