"""Linear layers with weights kept in the CPU library's own order.

One row at a time, reading a weight in an unsuitable order costs more than the arithmetic. The
operators used are private to the tensor library, so each shape is checked against the plain layer
first, and a layer that fails the check stays as it is.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

logger = logging.getLogger(__name__)

_MAX_RELATIVE_ERROR = 0.02


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
            if type(child) is not nn.Linear or not _is_eligible(child):
                continue
            shape = (child.in_features, child.out_features, child.bias is not None)
            if shape not in verdicts:
                verdicts[shape] = _is_right(child)
            if verdicts[shape]:
                setattr(parent, name, PrepackedLinear(child))
                replaced += 1
    return replaced


def _is_eligible(layer: nn.Linear) -> bool:
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


@torch.inference_mode()
def _is_right(layer: nn.Linear) -> bool:
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
        if not bool(error_size <= _MAX_RELATIVE_ERROR):
            logger.warning("prepacked linear layers are wrong by %.3f; not used", error_size)
            return False
    return True
