# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The library is not installed where types are checked: its classes are unknown.
"""Serializer for Zarr format 3 that encodes chunks as frames, with their dtype and shape.

Provisional: may change in any version.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from zarr.abc.codec import ArrayBytesCodec

import codec
from codec.errors import ArgumentError
from codec.integrations.chunks import (
    CODEC_NAME,
    checked,
    configuration,
    configured,
    decode_into,
    encode,
    values_of,
)
from codec.specs import Spec, SpecLike

__all__ = ["FrameSerializer"]


@dataclass(frozen=True, init=False)
class FrameSerializer(ArrayBytesCodec):
    """Zarr array-to-bytes codec with the name ``tensor-codec``, for the argument ``serializer`` of an array.

    Each chunk is stored as one frame with its shape, so that scales and entropy models can follow the rows of the
    chunk. Each frame has a checksum. Chunks are encoded and decoded in threads.

    Parameters
    ----------
    spec : Spec or name of a preset
        Codec and its parameters. Default: :class:`codec.Lossless`, which supports all dtypes of fixed size.
    dtype : str, optional
        Dtype as which array items are interpreted. For bfloat16, which Zarr does not support, use an array of uint16
        and ``"bfloat16"``. Default: the array's dtype.

    Raises
    ------
    SpecError
        `spec` is not a spec, or needs an optimizer or a base.
    ArgumentError
        `dtype`, or the dtype of the array, cannot be encoded with this spec.

    Examples
    --------
    >>> import zarr
    >>> from codec.integrations.zarr import FrameSerializer
    >>> x = np.random.default_rng(0).standard_normal((100, 1000), np.float32)
    >>> stored = zarr.create_array({}, data=x, chunks=(50, 500), serializer=FrameSerializer(), compressors=None)
    >>> bool((stored[:] == x).all()), stored.nbytes_stored() < 0.86 * x.nbytes
    (True, True)
    """

    spec: Spec
    dtype: str | None
    is_fixed_size = False

    def __init__(self, spec: SpecLike = "lossless", dtype: Any = None) -> None:
        plain, name = checked(spec, dtype)
        object.__setattr__(self, "spec", plain)
        object.__setattr__(self, "dtype", name)

    @classmethod
    def from_dict(cls, data: Any) -> "FrameSerializer":
        """Create a codec from its entry in an array's metadata; raise SpecError for an unknown key or wrong value."""
        return cls(*configured(data.get("configuration") or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the codec in an array's metadata."""
        return {"name": CODEC_NAME, "configuration": configuration(self.spec, self.dtype)}

    def validate(self, *, shape: Any, dtype: Any, chunk_grid: Any) -> None:
        """Raise ArgumentError if this spec does not support the dtype of an array."""
        native = dtype.to_native_dtype()
        if native.hasobject:
            raise ArgumentError(f"{CODEC_NAME} accepts dtypes of fixed size, got {native}")
        _, name = values_of(np.empty(0, native.newbyteorder("=")), self.dtype)
        codec.bound((), name, self.spec)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Raise NotImplementedError: the size depends on the values."""
        raise NotImplementedError

    def _encode_sync(self, chunk_array: Any, chunk_spec: Any) -> Any:
        x = chunk_array.as_numpy_array()
        x = np.ascontiguousarray(x, x.dtype.newbyteorder("=")).reshape(x.shape)
        return chunk_spec.prototype.buffer.from_bytes(encode(x, self.spec, self.dtype))

    def _decode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        out = np.empty(chunk_spec.shape, chunk_spec.dtype.to_native_dtype().newbyteorder("="))
        decode_into(chunk_bytes.as_numpy_array(), out, self.dtype)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(out)

    async def _encode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)
