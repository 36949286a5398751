# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The library is not installed where types are checked: its classes are unknown.
"""Codec for numcodecs, and so for Zarr format 2, that encodes chunks as frames.

Provisional: may change in any version.
"""

from typing import Any

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray, ensure_contiguous_ndarray_like

import codec
from codec._c.library import UNSIGNED
from codec.errors import FrameError
from codec.integrations.chunks import CODEC_NAME, checked, configuration, configured, decode, encode
from codec.specs import SpecLike

__all__ = ["FrameCodec"]


class FrameCodec(Codec):
    """numcodecs codec with the id ``tensor-codec`` that encodes buffers as frames.

    Instances are immutable, can be pickled, and may be shared by threads.

    Parameters
    ----------
    spec : Spec or name of a preset
        Codec and its parameters. Default: :class:`codec.Lossless`, which supports all dtypes except objects.
    dtype : str, optional
        Dtype as which array items are interpreted, such as ``"bfloat16"`` for uint16. Default: the array's dtype.

    Raises
    ------
    SpecError
        `spec` is not a spec, or needs an optimizer or a base.
    ArgumentError
        `dtype` cannot be encoded with this spec.

    Examples
    --------
    >>> import numcodecs
    >>> small = numcodecs.get_codec({"id": "tensor-codec", "spec": "Quantize", "bits": 4})
    >>> x = np.random.default_rng(0).standard_normal((64, 1000), np.float32)
    >>> len(small.encode(x)) / x.nbytes < 0.15
    True
    """

    codec_id = CODEC_NAME

    def __init__(self, spec: SpecLike = "lossless", dtype: Any = None) -> None:
        self._spec, self._dtype = checked(spec, dtype)

    def encode(self, buf: Any) -> bytes:
        """Return the frame of a contiguous buffer or array.

        Raises
        ------
        TypeError
            `buf` is not a buffer, or contains objects.
        ValueError
            `buf` is not contiguous, or the codec does not support its dtype or values.
        """
        x = ensure_contiguous_ndarray_like(buf, flatten=False)
        return encode(np.asarray(x if x.flags.c_contiguous else x.T), self._spec, self._dtype)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a frame, and return the bytes of its array.

        Parameters
        ----------
        buf : buffer
            Frame.
        out : buffer, optional
            Buffer for the result, with the size of the array in bytes. It is unchanged after an error.

        Returns
        -------
        numpy.ndarray of uint8, or `out`

        Raises
        ------
        FrameError
            `buf` is not a valid frame, or its array has another size than `out`.
        """
        frame = ensure_contiguous_ndarray(buf).view(np.uint8)
        info = codec.inspect(frame)
        bits = UNSIGNED[info.dtype]
        if out is None:
            return decode(frame, like=np.empty(0, bits)).reshape(-1).view(np.uint8)
        memory = ensure_contiguous_ndarray(out).view(np.uint8)
        if memory.nbytes != info.tensor_nbytes:
            raise FrameError(f"the frame holds an array of {info.tensor_nbytes} bytes, but out= has {memory.nbytes}")
        decode(frame, out=memory.view(bits).reshape(info.shape))
        return out

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as a JSON object."""
        return {"id": CODEC_NAME, **configuration(self._spec, self._dtype)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FrameCodec":
        """Create a codec from :meth:`get_config` without "id"; raise SpecError for an unknown key or wrong value."""
        return cls(*configured(config))

    def __hash__(self) -> int:
        return hash((self._spec, self._dtype))

    def __repr__(self) -> str:
        return f"FrameCodec({self._spec!r}, dtype={self._dtype!r})"
