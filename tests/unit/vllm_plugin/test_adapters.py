"""Whose weights an adapter's KV is of, and when that is not certain."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.vllm_plugin.adapters import AdapterContents
from tests.unit.vllm_plugin.adapter_files import FakeAdapter, write_adapter


def test_weights_and_configuration_count_and_no_name(tmp_path: Path) -> None:
    contents = AdapterContents()
    first = contents.digest(FakeAdapter(write_adapter(tmp_path / "p", b"one")))
    renamed = FakeAdapter(write_adapter(tmp_path / "q", b"one"), "b", 2)
    assert contents.digest(renamed) == first != ""
    for number, path in enumerate(
        (
            write_adapter(tmp_path / "weights", b"two"),
            write_adapter(tmp_path / "config", b"one", r=16),
        )
    ):
        assert contents.digest(FakeAdapter(path, "a", 3 + number)) not in ("", first)
    other_type = AdapterContents("torch.bfloat16")
    assert other_type.digest(renamed) not in ("", first)


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents, adapter = AdapterContents(), FakeAdapter(write_adapter(tmp_path / "p", b"one"))
    first = contents.digest(adapter)
    monkeypatch.setattr("kvferry.vllm_plugin.adapters._digest_of", None)
    assert contents.digest(adapter) == first


@pytest.mark.parametrize("path", ["org/adapter", "/does/not/exist"])
def test_what_cannot_be_read_is_not_certain_and_told_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    contents = AdapterContents()
    with caplog.at_level(logging.WARNING):
        assert [contents.digest(FakeAdapter(path)) for _ in range(3)] == ["", "", ""]
    (record,) = caplog.records
    assert "cannot be read" in record.getMessage()
    assert path in record.getMessage()


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_none(tmp_path: Path, missing: str) -> None:
    path = write_adapter(tmp_path / "p", b"one")
    (tmp_path / "p" / missing).unlink()
    assert AdapterContents().digest(FakeAdapter(path)) == ""


def test_other_files_without_a_reload_are_never_trusted(tmp_path: Path) -> None:
    contents, adapter = AdapterContents(), FakeAdapter(write_adapter(tmp_path / "p", b"one"))
    assert contents.digest(adapter)
    write_adapter(tmp_path / "p", b"two")
    assert contents.digest(adapter) == ""
    contents.note_cache_reset()  # vLLM goes on with the weights that it has loaded.
    assert contents.digest(adapter) == ""


def test_a_reload_in_place_is_certain_once_the_cache_is_reset(tmp_path: Path) -> None:
    contents, adapter = AdapterContents(), FakeAdapter(write_adapter(tmp_path / "p", b"one"))
    first = contents.digest(adapter)
    write_adapter(tmp_path / "p", b"two")
    reloaded = replace(adapter, load_inplace=True)
    assert contents.digest(reloaded) == ""
    contents.note_cache_reset()
    assert contents.digest(reloaded) not in ("", first)
    assert contents.digest(adapter) == ""  # A request of before the reload.


def test_what_is_loaded_anew_is_certain_once_the_cache_is_reset(tmp_path: Path) -> None:
    contents, adapter = AdapterContents(), FakeAdapter(write_adapter(tmp_path / "p", b"one"))
    first = contents.digest(adapter)
    write_adapter(tmp_path / "p", b"two")
    anew = replace(adapter, lora_int_id=2)
    assert contents.digest(anew) == "", "vLLM's cache knows name and path only"
    contents.note_cache_reset()
    assert contents.digest(anew) not in ("", first)


def test_who_ran_before_an_adapter_was_loaded_anew_is_never_of_the_new_weights(
    tmp_path: Path,
) -> None:
    contents, before = AdapterContents(), FakeAdapter(write_adapter(tmp_path / "p", b"one"))
    contents.digest(before)
    write_adapter(tmp_path / "p", b"two")
    contents.digest(replace(before, lora_int_id=2))
    contents.note_cache_reset()
    assert contents.digest(before) == ""


def test_another_path_in_place_is_certain_at_once_and_the_one_before_is_not(
    tmp_path: Path,
) -> None:
    contents = AdapterContents()
    before = FakeAdapter(write_adapter(tmp_path / "p", b"one"))
    after = FakeAdapter(write_adapter(tmp_path / "q", b"two"), load_inplace=True)
    first = contents.digest(before)
    assert contents.digest(after) not in ("", first)
    assert contents.digest(before) == "", "it ends with the other's weights in its place"
    back = replace(before, load_inplace=True)
    assert contents.digest(back) == ""
    contents.note_cache_reset()
    assert contents.digest(back) == first


def test_the_same_files_touched_are_the_same(tmp_path: Path) -> None:
    contents, adapter = AdapterContents(), FakeAdapter(write_adapter(tmp_path / "p", b"one"))
    first = contents.digest(adapter)
    write_adapter(tmp_path / "p", b"one")
    assert contents.digest(adapter) == first
