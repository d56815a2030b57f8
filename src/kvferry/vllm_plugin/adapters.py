"""LoRA adapters by their content: what keeps the KV of one apart from another's of its name.

vLLM names an adapter and its folder, and keeps KV of its own prefix cache by both. Neither tells
the weights: so they are read here, once, and looked at again whenever a request begins or ends.
KV is exchanged only while it is certain whose weights it was computed with. Scheduler's thread.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvferry.observe.log import get_logger
from kvferry.protocol.compatibility import content_digest

_log = get_logger(__name__)
_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILES = (
    "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt",
    "new_embeddings.safetensors", "new_embeddings.bin",
)  # fmt: skip
_NOT_CONTENT = frozenset({"base_model_name_or_path", "peft_version"})
"""Of the configuration: what may differ between two copies."""
_Signature = tuple[tuple[str, int, int, int, int], ...]
"""Of each file: name, inode, bytes, and when content and inode last changed."""


class Adapter(Protocol):
    """A LoRA adapter as vLLM names it."""

    lora_name: str
    lora_int_id: int
    """The place that it takes among loaded ones."""
    lora_path: str
    """Its folder, or another name of it."""
    load_inplace: bool
    """Whether it was loaded in the place of another; vLLM then reads it anew each step."""


@dataclass(slots=True)
class _Content:
    """What one name and path stand for; ``digest`` is empty while that is not certain."""

    signature: _Signature
    digest: str
    places: set[int]
    """Where vLLM has loaded just these weights; elsewhere it may still have earlier ones."""
    seen: set[int] = field(default_factory=set)
    """All places that it was named in."""
    has_changed: bool = False
    """vLLM's cache may hold KV of earlier weights under the same name and path."""

    def is_certain(self, adapter: Adapter) -> bool:
        """Whether the adapter's KV is of these weights."""
        is_loaded = _is_in_place(adapter) or adapter.lora_int_id in self.places
        return is_loaded and not self.has_changed


class AdapterContents:
    """The adapters that requests have named. ``kind``: as what weights are computed with."""

    def __init__(self, kind: str = "") -> None:
        self._kind = kind
        self._contents: dict[tuple[str, str], _Content] = {}
        self._key_of_id: dict[int, tuple[str, str]] = {}
        """Which of them was last seen in each place."""
        self._warned: set[tuple[str, str]] = set()

    def digest(self, adapter: Adapter) -> str:
        """Return the digest of the weights that the adapter's KV is computed with by now.

        Empty where that is not certain: the files cannot be read here, or vLLM may still have
        earlier weights or their KV.
        """
        key = (adapter.lora_name, adapter.lora_path)
        before = self._key_of_id.setdefault(adapter.lora_int_id, key)
        if before != key and not _is_in_place(adapter):
            return ""  # A request of before: another adapter is in its place.
        if before != key:
            self._key_of_id[adapter.lora_int_id] = key
            # Requests that ran meanwhile were computed with both.
            self._doubt(before, "was replaced while it was loaded")
        content = self._content(key, adapter)
        return content.digest if content.is_certain(adapter) else ""

    def note_cache_reset(self) -> None:
        """vLLM's cache holds nothing any more: what was loaded anew is certain again."""
        self._warned.clear()
        for content in self._contents.values():
            content.has_changed = False

    def _content(self, key: tuple[str, str], adapter: Adapter) -> _Content:
        place, folder = adapter.lora_int_id, _folder_of(adapter.lora_path)
        signature = _signature_of(folder)
        known = self._contents.get(key)
        if known is not None and known.signature == signature:
            if place not in known.seen:
                known.places.add(place)
            known.seen.add(place)
            return known
        digest = _digest_of(folder, self._kind) if signature else ""
        if not digest or _signature_of(folder) != signature:
            self._warn(key, "cannot be read here as a folder of weights")
            digest = ""
        if known is None:
            known = self._contents[key] = _Content(signature, digest, {place})
        elif digest != known.digest:
            known.digest, known.places = digest, set() if place in known.seen else {place}
            self._doubt(key, "has other weights than before")
        known.signature = signature
        known.seen.add(place)
        return known

    def _doubt(self, key: tuple[str, str], why: str) -> None:
        content = self._contents.get(key)
        if content is not None and not content.has_changed:
            content.has_changed = True
            self._warn(key, f"{why}, and vLLM's prefix cache may hold KV of the earlier ones")

    def _warn(self, key: tuple[str, str], why: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning(
                "adapter %s (%s) %s: its requests are computed where they are, and their KV is "
                "neither handed over nor read back; load changed weights from a new path, or reset "
                "the prefix cache after loading them in place",
                *key,
                why,
            )


def _is_in_place(adapter: Adapter) -> bool:
    # An attribute that earlier vLLMs lack: there nothing is loaded in place.
    return bool(getattr(adapter, "load_inplace", False))


def _folder_of(path: str) -> Path:
    return Path(os.path.expanduser(path))


def _signature_of(folder: Path) -> _Signature:
    """Return how the adapter's files stand; empty unless there are weights and a configuration."""
    found = []
    for name in (_CONFIG_FILE, *_WEIGHTS_FILES):
        try:
            stat = (folder / name).stat()
        except OSError:
            continue
        found.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    names = [name for name, *_ in found]
    has_weights = any(name in names for name in _WEIGHTS_FILES[:3])
    return tuple(found) if _CONFIG_FILE in names and has_weights else ()


def _digest_of(folder: Path, kind: str) -> str:
    try:
        config = json.loads((folder / _CONFIG_FILE).read_bytes())
        weights = [folder / name for name in _WEIGHTS_FILES if (folder / name).is_file()]
        kept = {name: value for name, value in config.items() if name not in _NOT_CONTENT}
        encoded = json.dumps([kind, kept], sort_keys=True).encode()
        return content_digest(encoded, *(part for file in weights for part in _parts_of(file)))
    except (OSError, ValueError, AttributeError):
        return ""


def _parts_of(file: Path) -> tuple[bytes, bytes]:
    with file.open("rb") as stream:
        return file.name.encode(), hashlib.file_digest(stream, "blake2b").digest()
