"""Load a causal language model from a folder, and refuse what the engine would compute wrongly.

Models may carry a feature that no configuration field betrays; wrong logits betray it at start-up
rather than in answers: the paged forward is compared with the unmodified model's own. On a CPU,
linear layers keep their weights in the library's own order: one row at a time, reading a weight in
an unsuitable order costs more than the arithmetic. The operators for that are private to the tensor
library, so each shape is checked against the plain layer first, and one that fails stays as it is.

Owns the model object and what is read off its configuration. Knows no block and no request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvferry.engine.attention import ATTENTION_NAME, PagedBatch, register_paged_attention
from kvferry.engine.config import EngineConfig
from kvferry.engine.forward import ModelForward
from kvferry.engine.live_request import Chunk, LiveRequest
from kvferry.engine.paged_cache import CacheShape, PagedCache
from kvferry.engine.request import EngineRequest
from kvferry.errors import ConfigError
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.hashing import chain_root
from kvferry.protocol.ids import BlockNumber, RequestId

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_WHOLE_FILE_BYTES = 512 * 1024 * 1024
_SAMPLES_PER_FILE = 256
_SAMPLE_BYTES = 65_536
# Fields that say where a model came from or how it is run, not what it computes.
_IGNORED_CONFIG_FIELDS = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
    | {"_attn_implementation", "attn_implementation", "use_cache", "output_attentions"}
    | {"output_hidden_states", "return_dict"}
)
# Rotary scalings that depend on the longest sequence of a batch.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_CHECK_BLOCK_SIZE_TOKENS = 4
_CHECK_TOKENS = 20
# Chunks end within and at the end of a block, one is a single token, the last is longer.
_CHECK_CHUNK_ENDS = (6, 7, 12, 20)
_MAX_LOGITS_ERROR = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
_MAX_LINEAR_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for paged forwards."""

    module: nn.Module
    name: str
    dtype: torch.dtype
    device: torch.device
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    max_model_len: int
    """Most tokens of prompt and answer."""
    eos_token_ids: frozenset[int]
    weights_digest: str
    config_digest: str
    num_prepacked_linears: int

    def cache_shape(self, block_size_tokens: int) -> CacheShape:
        """Return the geometry of this model's KV."""
        return CacheShape(
            self.num_layers, self.num_kv_heads, self.head_size, block_size_tokens, self.dtype
        )

    def layout(self, block_size_tokens: int) -> KVLayout:
        """Return what peers compare before they move blocks."""
        shape = self.cache_shape(block_size_tokens)
        return KVLayout(
            model_name=self.name,
            weights_digest=self.weights_digest,
            config_digest=self.config_digest,
            kv_dtype=str(self.dtype).removeprefix("torch."),
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size_tokens=block_size_tokens,
            block_bytes=shape.block_bytes,
            attention_backend="kvferry-paged/block-layer-kv-token-head",
            region_strides=shape.strides_bytes,
        )

    @torch.inference_mode()
    def logits(
        self, token_ids: Tensor, positions: Tensor, last_tokens: Tensor, batch: PagedBatch
    ) -> Tensor:
        """Run one forward over the flat batch ``token_ids`` and ``positions``, ``[1, tokens]``.

        Returns logits ``[len(last_tokens), vocabulary]`` of the tokens at those indices.
        """
        arguments = {"position_ids": positions, "use_cache": False, "paged": batch}
        if last_tokens.numel() == 0:
            self.module.base_model(token_ids, **arguments)  # type: ignore[operator]
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return torch.empty(0, self.vocabulary_size)
        output = self.module(token_ids, logits_to_keep=last_tokens, **arguments)
        result: Tensor = output.logits[0]
        return result


def load_model(folder: Path | str, config: EngineConfig) -> LoadedModel:
    """Load the model in ``folder`` from local safetensors files.

    Its logits for a short prompt are compared with the unmodified model's. Raises ``ConfigError``
    if the folder cannot be read, or holds a model that the paged attention computes wrongly.
    """
    folder = Path(folder)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = _device(config.device)
    module = _load_module(folder, config.dtype, device)
    settings: PretrainedConfig = module.config
    _refuse_unsupported(module, settings)
    heads = int(settings.num_attention_heads)
    expected = reference_logits(module)
    packed = prepack_linears(module) if config.prepack_linears else 0
    model = LoadedModel(
        module=module,
        name=folder.resolve().name,
        dtype=next(module.parameters()).dtype,
        device=device,
        num_layers=int(settings.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(getattr(settings, "num_key_value_heads", None) or heads),
        head_size=int(getattr(settings, "head_dim", None) or settings.hidden_size // heads),
        vocabulary_size=int(settings.vocab_size),
        max_model_len=_max_model_len(settings, config.max_model_len),
        eos_token_ids=_eos_token_ids(module),
        weights_digest=weights_digest(folder),
        config_digest=_config_digest(settings),
        num_prepacked_linears=packed,
    )
    _require_equal_logits(model, expected)
    return model


@contextlib.contextmanager
def quiet_library(*, hides_warnings: bool = False) -> Iterator[None]:
    """Switch off the progress bars of the model library for a moment, and its warnings if asked."""
    from transformers.utils import logging as library_logging

    had_bars, verbosity = library_logging.is_progress_bar_enabled(), library_logging.get_verbosity()
    library_logging.disable_progress_bar()
    if hides_warnings:
        library_logging.set_verbosity_error()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if had_bars:
            library_logging.enable_progress_bar()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but no CUDA device is available; use 'cpu'")
    return device


def _load_module(folder: Path, dtype: str, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    register_paged_attention()
    try:
        with quiet_library():
            module: nn.Module = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                dtype="auto" if dtype == "auto" else getattr(torch, dtype),
                attn_implementation=ATTENTION_NAME,
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"cannot load the model in {folder}: {error}") from error
    return module.to(device).eval().requires_grad_(False)


def _refuse_unsupported(module: nn.Module, settings: PretrainedConfig) -> None:
    """Raise ``ConfigError`` naming the first feature that the paged attention lacks."""
    kind = type(module).__name__
    layer_types = getattr(settings, "layer_types", None) or ()
    other_layers = sorted({str(layer_type) for layer_type in layer_types} - {"full_attention"})
    window = getattr(settings, "sliding_window", None)
    uses_window = window is not None and getattr(settings, "use_sliding_window", True)
    rope = getattr(settings, "rope_parameters", None) or {}
    rope_types = {rope.get("rope_type")} if "rope_type" in rope else set()
    reasons = {
        "no causal attention over all layers": not hasattr(settings, "num_attention_heads"),
        f"layers of type {', '.join(other_layers)}": bool(other_layers),
        f"a sliding window of {window} tokens": uses_window and not layer_types,
        "multi-head latent attention": getattr(settings, "kv_lora_rank", None) is not None,
        "soft-capped attention": bool(getattr(settings, "attn_logit_softcapping", None)),
        "rotary positions that depend on the batch": bool(rope_types & _BATCH_DEPENDENT_ROPE),
        "an encoder": bool(getattr(settings, "is_encoder_decoder", False)),
        "no replaceable attention": not getattr(module, "_supports_attention_backend", False),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"{kind} is not supported: it has {reason}")


def _max_model_len(settings: PretrainedConfig, wanted: int | None) -> int:
    context = int(getattr(settings, "max_position_embeddings", 0) or 0)
    if wanted is not None and context and wanted > context:
        raise ConfigError(f"max_model_len is {wanted}, more than the model's context of {context}")
    if wanted is None and not context:
        raise ConfigError("the model does not say how long its context is; give max_model_len")
    return wanted or context


def _eos_token_ids(module: nn.Module) -> frozenset[int]:
    found: set[int] = set()
    for source in (getattr(module, "generation_config", None), module.config):
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)


def _config_digest(settings: PretrainedConfig) -> str:
    effective = {k: v for k, v in settings.to_dict().items() if k not in _IGNORED_CONFIG_FIELDS}
    encoded = json.dumps(effective, sort_keys=True, default=str).encode()
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def weights_digest(folder: Path) -> str:
    """Return a digest of the safetensors files in ``folder``.

    Files up to 512 MiB are read whole; of larger ones the length, the header and evenly spread
    samples. Raises ``ConfigError`` if there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no .safetensors files")
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name}:{size};".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_FILE_BYTES:
                while part := stream.read(1 << 20):
                    state.update(part)
                continue
            header_bytes = int.from_bytes(stream.read(8), "little")
            state.update(stream.read(min(header_bytes, 1 << 26)))
            for index in range(_SAMPLES_PER_FILE):
                stream.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES_PER_FILE - 1))
                state.update(stream.read(_SAMPLE_BYTES))
    return state.hexdigest()


@torch.inference_mode()
def reference_logits(module: nn.Module) -> Tensor:
    """Return the last token's logits for a short fixed prompt, by the library's own attention."""
    settings = module.config
    token_ids = torch.tensor([_check_prompt(settings.vocab_size)])  # type: ignore[union-attr, arg-type]
    device = next(module.parameters()).device
    module.set_attn_implementation("sdpa")  # type: ignore[operator]
    try:
        output = module(token_ids.to(device), use_cache=False)
    finally:
        module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    logits: Tensor = output.logits[0, -1].float().cpu()
    return logits


def _require_equal_logits(model: LoadedModel, expected: Tensor) -> None:
    """Compute the same prompt in chunks through a paged cache; raise ``ConfigError`` if it differs.

    Leaves nothing behind.
    """
    shape = model.cache_shape(_CHECK_BLOCK_SIZE_TOKENS)
    num_blocks = -(-_CHECK_TOKENS // _CHECK_BLOCK_SIZE_TOKENS)
    memory = torch.zeros(num_blocks * shape.block_bytes, dtype=torch.uint8, device=model.device)
    forward = ModelForward(model, PagedCache(shape, memory))
    prompt = tuple(_check_prompt(model.vocabulary_size))
    request = LiveRequest(
        request=EngineRequest(request_id=RequestId("self-check"), prompt_token_ids=prompt),
        on_output=lambda output: None,
        arrival=0,
        arrived_s=0.0,
        seed=0,
        root=chain_root(b""),
        stop_token_ids=frozenset(),
        max_total_tokens=len(prompt) + 1,
    )
    request.blocks = [BlockNumber(block) for block in reversed(range(num_blocks))]
    start = 0
    for end in _CHECK_CHUNK_ENDS:
        logits = forward([Chunk(request, start, end - start, samples=end == _CHECK_TOKENS)])
        start = end
    difference = np.linalg.norm(logits[0] - expected.numpy()) / np.linalg.norm(expected.numpy())
    if not difference <= _MAX_LOGITS_ERROR[model.dtype]:
        raise ConfigError(
            f"{type(model.module).__name__} is not supported: paged attention gives logits that "
            f"differ by {difference:.3g} from the model's own"
        )


def _check_prompt(vocabulary_size: int) -> list[int]:
    return [(7 + 31 * index) % vocabulary_size for index in range(_CHECK_TOKENS)]


class PrepackedLinear(nn.Module):
    """``y = x W^T + b`` for inference on the CPU, bfloat16."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        # Not a buffer: an opaque tensor can be neither copied nor saved.
        self.packed: Any = torch.ops.mkldnn._reorder_linear_weight(source.weight.detach())
        self.bias = source.bias

    def forward(self, rows: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, self.bias, "none", [], ""
        )
        return result


def prepack_linears(model: nn.Module) -> int:
    """Replace the bfloat16 CPU ``nn.Linear`` modules of ``model``; return how many were.

    A weight that nothing else shares is freed with its module: the prepacked copy replaces it.
    """
    verdicts: dict[tuple[int, int, bool], bool] = {}
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or not _is_packable(child):
                continue
            shape = (child.in_features, child.out_features, child.bias is not None)
            if shape not in verdicts:
                verdicts[shape] = _is_packed_right(child)
            if verdicts[shape]:
                setattr(parent, name, PrepackedLinear(child))
                replaced += 1
    return replaced


def _is_packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


@torch.inference_mode()
def _is_packed_right(layer: nn.Linear) -> bool:
    """Compare both ways to compute, for one row and for several."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 5):
        rows = torch.randn(1, num_rows, layer.in_features, generator=generator).bfloat16()
        expected = linear(rows, layer.weight, layer.bias).float()
        try:
            found = PrepackedLinear(layer)(rows).float()
        except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
            logger.warning("prepacked linear layers are not available: %s", error)
            return False
        if found.shape != expected.shape:
            return False
        error_size = (found - expected).norm() / expected.norm().clamp_min(1e-6)
        if not bool(error_size <= _MAX_LINEAR_ERROR):
            logger.warning("prepacked linear layers are wrong by %.3f; not used", error_size)
            return False
    return True
