# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Storage backend for SGLang's HiCache: files of encoded pages, lossless or quantized to 1 to 8 bits per value.

Provisional: may change in any version.

The server loads the backend by name::

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "codec", "module_path": "codec.integrations.sglang", "class_name": "CodecFile",
      "file_storage_path": "/cache", "key_bits": 8, "value_bits": 4}'

``key_bits`` and ``value_bits`` are the bits of :class:`codec.Quantize`; ``group_size`` is the number of values that
share a scale. By default pages are lossless. Pages that do not contain the keys and values of all heads are always
lossless. Other settings are those of SGLang's file backend, which also provides eviction and the metadata cache.
"""

import logging
import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from codec.errors import ArgumentError, CodecError
from codec.integrations.kv import dtype_of, flat_page, page_codec
from codec.kv import PageCodec

__all__ = ["CodecFile"]

logger = logging.getLogger(__name__)

# By layout of the host pool: axes of a flat page (s = side, l = layer, t = token, h = head, d = channel), and the
# permutation of these axes that results in (layers, sides, tokens, heads, channels).
_ORDERS = {
    "layer_first": ("slthd", (1, 0, 2, 3, 4)),
    "page_first": ("stlhd", (2, 0, 1, 3, 4)),
    "page_first_direct": ("slthd", (1, 0, 2, 3, 4)),
    "page_head": ("shtld", (3, 0, 2, 1, 4)),
}


class CodecFile(HiCacheFile):
    """File backend whose files hold encoded pages. A damaged file counts as a cache miss, and is removed.

    File names contain "-codec", so that the folder may be shared with SGLang's backend ``file``.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        config = dict(storage_config.extra_config or {})
        bits = config.get("key_bits"), config.get("value_bits")
        self._quantize = (*bits, config.get("group_size", 64))
        page_codec((1, 2, 16, 16), "bfloat16", *self._quantize)  # raises if a setting is invalid
        super().__init__(replace(storage_config, model_name=f"{storage_config.model_name or ''}-codec"))

    def get(self, key: str, target_location: Any, target_sizes: Any = None) -> torch.Tensor | None:
        """Decode a page into `target_location` and return it; None if the page is missing or damaged."""
        suffixed = self._get_suffixed_key(key)
        path = os.path.join(self.file_path, f"{suffixed}.bin")
        try:
            data = torch.empty(os.path.getsize(path), dtype=torch.uint8)
            if super().get(key, data) is None:
                return None
            page, pages = self._page(target_location)
            pages.decode(data.numpy(), out=page)
        except (CodecError, OSError) as e:
            logger.warning("page %s cannot be read: %s", key, e)
            if isinstance(e, CodecError):  # a damaged file would never be overwritten: set() keeps existing files
                with suppress(OSError):
                    os.remove(path)
            if self.metadata_cache is not None:
                self.metadata_cache.remove(suffixed)
            return None
        return target_location

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Encode a page into its file. A page with NaN or Inf is encoded losslessly."""
        if self.exists(key):
            return super().set(key, value)
        page, pages = self._page(value)
        try:
            data = pages.encode(page)
        except ArgumentError:
            data = page_codec(pages.shape, pages.dtype, None, None, 64).encode(page)
        return super().set(key, torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)))

    def _page(self, flat: torch.Tensor) -> tuple[torch.Tensor, PageCodec]:
        """Return a view of a flat page with shape (layers, sides, tokens, heads, channels), and its codec."""
        pool = self.mem_pool_host
        order, axes = _ORDERS.get(getattr(pool, "layout", ""), ("", ()))
        names = {"l": "layer_num", "t": "page_size", "h": "head_num", "d": "head_dim"}
        sizes = [2 if axis == "s" else getattr(pool, names[axis], 0) for axis in order]
        if order and np.prod(sizes) == flat.numel() and flat.dtype == pool.dtype:
            page = flat.view(sizes).permute(axes)
            return page, page_codec(tuple(page.shape), dtype_of(flat), *self._quantize)
        page = flat_page(flat)
        return page, page_codec(tuple(page.shape), dtype_of(flat), None, None, 64)
