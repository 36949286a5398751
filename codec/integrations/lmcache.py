# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Serde ``codec`` for LMCache's second tier: lossless, or quantized to 1 to 8 bits per value.

Provisional: may change in any version.

LMCache has no entry points for serdes. So start its server with this module, which registers the serde first::

    python -m codec.integrations.lmcache server --l2-adapter '{"type": "fs", "base_path": "/cache",
        "serde": {"type": "codec", "key_bits": 8, "value_bits": 4}}'

The file adapter of LMCache loads an object only if its size is exactly the serde's estimate. So each object
has a slot of a fixed size, and a chunk whose encoding does not fit into its slot is not stored. Settings:

``key_bits``, ``value_bits``
    Bits of :class:`codec.Quantize`, 1 to 8. Default: lossless.
``group_size``
    Number of tokens (keys) or channels (values) that share a scale and a zero point; default 64.
``head_size``
    Channels of a key, for servers that store the key and the value of a head next to each other, as vLLM does from 0.26
    on. Such a chunk has one side; ``head_size`` splits its rows into keys and values. Without ``head_size``, a chunk of
    one side is quantized with the larger one of ``key_bits`` and ``value_bits``, in groups along tokens.
``slot``
    Size of a slot as a fraction of the chunk's size, for lossless chunks; default 0.75.
``max_workers``
    Number of threads with which LMCache runs the serde; default 1.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, SerdeProcessor, Serializer
from lmcache.v1.distributed.serde.factory import get_registered_serde_types, register_serde_factory
from lmcache.v1.memory_management import MemoryObj

from codec.integrations.kv import flat_page, page_codec
from codec.kv import PageCodec

__all__ = ["make_serde"]


class SerdeSettings:
    """Validated settings of the serde, with the codec and the slot size for each tensor layout."""

    def __init__(
        self,
        key_bits: int | None = None,
        value_bits: int | None = None,
        group_size: int = 64,
        slot: float = 0.75,
        head_size: int | None = None,
    ) -> None:
        if not 0 < slot <= 2:
            raise ValueError(f"slot must be above 0 and at most 2, as a fraction of the chunk's size, got {slot}")
        if head_size is not None and (type(head_size) is not int or head_size < 1):
            raise ValueError(f"head_size must be the number of channels of a key, at least 1, got {head_size}")
        page_codec((1, 2, 16, 16), "bfloat16", key_bits, value_bits, group_size)  # raises if a setting is invalid
        self._bits, self._group_size, self._slot = (key_bits, value_bits), group_size, slot
        self._head_size = head_size

    def codec_of(self, shape: torch.Size, dtype: torch.dtype) -> PageCodec:
        """Return the codec for an LMCache tensor of this shape and dtype."""
        page = self.page(torch.empty(shape, dtype=dtype, device="meta"))
        key_bits, value_bits = self._bits
        if page.shape[1] == 1:  # the rows may hold keys, which need more bits
            value_bits = None if key_bits is None or value_bits is None else max(key_bits, value_bits)
        name = str(dtype).removeprefix("torch.")
        return page_codec(tuple(page.shape), name, key_bits, value_bits, self._group_size)

    def page(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of a chunk as a page; see :func:`as_page`."""
        return as_page(x, self._head_size)

    def slot_nbytes(self, shapes: list[torch.Size], dtypes: list[torch.dtype]) -> int:
        """Return the slot size of a chunk in bytes.

        For each tensor this is the smaller of the upper bound of its encoded size and `slot` times its size.
        """
        nbytes = 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            pages = self.codec_of(shape, dtype)
            nbytes += pages.bound if pages.bound < self._slot * pages.nbytes else math.ceil(self._slot * pages.nbytes)
        return nbytes


def as_page(x: torch.Tensor, head_size: int | None = None) -> torch.Tensor:
    """Return a view of a chunk with shape (layers, sides, tokens, channels).

    Accepts (2, layers, tokens, channels); (1, layers, tokens, channels) and (layers, tokens, channels), whose rows are
    latents of attention, or the key and the value of each head. If `head_size` is given, the rows of (1, layers,
    tokens, channels) are split into keys and values of `head_size` channels. Otherwise a chunk of one side becomes
    (layers, 1, channels, tokens): groups along tokens suit keys as well as values. Tensors of other shapes become a
    flat page.

    Raises
    ------
    ValueError
        The rows are not keys and values of `head_size` channels.
    """
    if x.ndim == 4 and x.shape[0] == 2:
        return x.transpose(0, 1)
    if x.ndim == 4 and x.shape[0] == 1 and head_size is not None:
        if x.shape[3] % (2 * head_size):
            raise ValueError(
                f"head_size={head_size}: a row of the chunk has {x.shape[3]} values, not keys and values of that size"
            )
        return x[0].unflatten(2, (-1, 2, head_size)).permute(0, 3, 1, 2, 4)
    if x.ndim == 3 or (x.ndim == 4 and x.shape[0] == 1):
        return x.reshape(x.shape[-3:]).transpose(1, 2).unsqueeze(1)
    return flat_page(x)


def tensors(obj: MemoryObj) -> Iterator[tuple[torch.Tensor, torch.Size, torch.dtype]]:
    """Yield each tensor of a chunk with its shape and dtype. A chunk has one tensor per group of layers."""
    if obj.metadata.shapes is None:
        yield obj.tensor, obj.get_shape(), obj.get_dtype()
        return
    for i, (shape, dtype) in enumerate(zip(obj.get_shapes(), obj.get_dtypes(), strict=True)):
        yield obj.get_tensor(i), shape, dtype


class CodecSerializer(Serializer):
    """Encode a chunk into its slot. If it does not fit, raise ValueError, so that LMCache does not store it."""

    def __init__(self, settings: SerdeSettings) -> None:
        self._settings = settings

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Write the encoded chunk, fill the rest of the slot with zeros, and return the slot size in bytes."""
        slot, given = dst.raw_tensor.view(torch.uint8), list(tensors(src))
        nbytes = self._settings.slot_nbytes([shape for _, shape, _ in given], [dtype for *_, dtype in given])
        data = b"".join(
            self._settings.codec_of(shape, dtype).encode(self._settings.page(x)) for x, shape, dtype in given
        )
        if len(data) > nbytes:
            raise ValueError(f"the encoded chunk has {len(data)} bytes, but its slot has {nbytes}: use a larger slot=")
        slot[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        slot[len(data) : nbytes] = 0
        return nbytes

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Return the slot size in bytes."""
        return self._settings.slot_nbytes(layout_desc.shapes, layout_desc.dtypes)


class CodecDeserializer(Deserializer):
    """Decode a slot. Damaged bytes raise FrameError, so that LMCache counts a failed load and ignores the chunk."""

    def __init__(self, settings: SerdeSettings) -> None:
        self._settings = settings

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decode the slot `src` into the tensors of the chunk `dst`."""
        data = memoryview(src.byte_array).cast("B")
        for x, shape, dtype in tensors(dst):
            nbytes = PageCodec.page_nbytes(data)
            self._settings.codec_of(shape, dtype).decode(data[:nbytes], out=self._settings.page(x))
            data = data[nbytes:]


def make_serde(kwargs: dict[str, Any]) -> SerdeProcessor:
    """Return the serde for the settings in a configuration."""
    workers = int(kwargs.get("max_workers", 1))
    settings = SerdeSettings(**{name: value for name, value in kwargs.items() if name != "max_workers"})
    return AsyncSerdeProcessor(CodecSerializer(settings), CodecDeserializer(settings), max_workers=workers)


if "codec" not in get_registered_serde_types():
    register_serde_factory("codec", make_serde)

if __name__ == "__main__":
    from lmcache.cli.main import main

    main()
