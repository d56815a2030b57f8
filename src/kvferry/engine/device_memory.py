"""KV memory on an accelerator, which no transport allocates.

Owns one tensor of bytes; the cache's views and the transport's region both point into it.
"""

from __future__ import annotations

import torch

from kvferry.errors import CapacityError


def allocate_device_memory(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Return ``num_bytes`` zeroed bytes on ``device``. Raises ``CapacityError``."""
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{num_bytes} bytes of KV cache do not fit on {device}: {error}; "
            "lower --kv-cache-gib or --num-blocks"
        ) from error
