"""Autocast without its cache of converted weights."""

from __future__ import annotations

import torch


def uncached_autocast(device: str) -> torch.autocast:
    """Return a context manager under which autocast converts weights again for every product.

    Otherwise, autocast keeps a converted copy of every weight until its outermost block ends, and sums the gradients of all
    products with a weight in the copy's data type.

    Args:
        device: type of the device, such as "cuda".
    """
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)
