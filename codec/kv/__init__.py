"""Compression of KV cache pages: each page becomes a checksummed byte string, lossless or with 1 to 8 bits per value.

Provisional: may change in any version.

A :class:`PageCodec` encodes pages of any layout for tiers in host memory, on disk or behind a network. Adapters for
LMCache, SGLang and vLLM are in :mod:`codec.integrations`. This package needs no framework.
"""

from codec.kv.pages import PageCodec

__all__ = ["PageCodec"]
