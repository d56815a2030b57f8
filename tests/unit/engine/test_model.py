from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine import attention, model
from kvferry.engine.config import EngineConfig
from kvferry.engine.model import load_model, weights_digest
from kvferry.errors import ConfigError
from tests.support.tiny_model import TINY_EOS_TOKEN_ID, TINY_VOCABULARY_SIZE, make_tiny_model

CONFIG = EngineConfig(num_threads=1)


def with_settings(folder: Path, target: Path, **changes: Any) -> Path:  # noqa: ANN401 - JSON
    """Copy a model folder with another configuration."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return target


def test_what_is_read_off_the_folder(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir, CONFIG)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_size) == (2, 6, 2, 16)
    assert model.vocabulary_size == TINY_VOCABULARY_SIZE
    assert model.eos_token_ids == {TINY_EOS_TOKEN_ID}
    assert (model.dtype, model.max_model_len) == (torch.float32, 8192)
    layout = model.layout(16)
    assert layout.block_bytes == 2 * 2 * 16 * 2 * 16 * 4
    assert layout.region_strides[0] == layout.block_bytes
    assert (layout.kv_dtype, layout.num_regions) == ("float32", 1)


def test_copies_agree_and_other_weights_do_not(tiny_model_dir: Path, tmp_path: Path) -> None:
    mine = load_model(tiny_model_dir, CONFIG).layout(16)
    copied = shutil.copytree(tiny_model_dir, tmp_path / "another name")
    theirs = load_model(copied, CONFIG).layout(16)
    mine.require_equal(theirs)
    assert mine.fingerprint() == theirs.fingerprint()
    other = make_tiny_model(tmp_path / "other", seed=1)
    assert weights_digest(other) != mine.weights_digest
    rope = {"rope_type": "default", "rope_theta": 500.0}
    tuned = with_settings(tiny_model_dir, tmp_path / "tuned", rope_parameters=rope)
    assert load_model(tuned, CONFIG).layout(16).config_digest != mine.config_digest
    assert load_model(tiny_model_dir, EngineConfig(dtype="bfloat16")).layout(16) != mine


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    whole = weights_digest(folder)
    monkeypatch.setattr("kvferry.engine.model._WHOLE_FILE_BYTES", 1024)
    sampled = weights_digest(folder)
    assert sampled != whole
    assert sampled == weights_digest(folder)
    assert sampled != weights_digest(make_tiny_model(tmp_path / "other", seed=1))


def test_a_longer_context_than_the_models_is_refused(tiny_model_dir: Path) -> None:
    assert load_model(tiny_model_dir, EngineConfig(max_model_len=100)).max_model_len == 100
    with pytest.raises(ConfigError, match=r"9000, more than the model's context of 8192"):
        load_model(tiny_model_dir, EngineConfig(max_model_len=9000))


def test_folders_that_are_no_models(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, CONFIG)
    bare = with_settings(tiny_model_dir, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot load"):
        load_model(bare, CONFIG)
    unknown = with_settings(tiny_model_dir, tmp_path / "unknown", model_type="no-such-model")
    with pytest.raises(ConfigError, match="cannot load"):
        load_model(unknown, CONFIG)


def test_an_unknown_or_absent_device_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="'tpu9'"):
        load_model(tiny_model_dir, EngineConfig(device="tpu9"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            load_model(tiny_model_dir, EngineConfig(device="cuda"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 128}, "sliding window of 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"kv_lora_rank": 64}, "latent"),
        ({"attn_logit_softcapping": 30.0}, "soft-capped"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary"),
    ],
)
def test_what_the_paged_attention_lacks_is_refused_by_name(
    tiny_model_dir: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = with_settings(tiny_model_dir, tmp_path / "changed", **changes)
    with pytest.raises(ConfigError, match=named):
        load_model(folder, CONFIG)


def test_wrong_logits_are_refused(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model would be whose attention has a feature that no setting betrays."""
    real = model.reference_logits

    def other(module: torch.nn.Module) -> torch.Tensor:
        logits = real(module)
        shifted: torch.Tensor = logits + 0.05 * logits.norm() / logits.numel() ** 0.5
        return shifted

    monkeypatch.setattr("kvferry.engine.model.reference_logits", other)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is not supported.*differ by 0\.0"):
        load_model(tiny_model_dir, CONFIG)


def test_a_past_that_is_ignored_is_noticed(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attention._attend_chunk_on_cpu
    monkeypatch.setattr(attention, "_attend_chunk_on_cpu", lambda heads, past: real(heads, None))
    with pytest.raises(ConfigError, match="not supported"):
        load_model(tiny_model_dir, CONFIG)
