"""Exact sizes of frames whose codec has a fixed rate, computed from shapes alone."""

from collections.abc import Iterable
from typing import Any

from codec._c.library import check, lib
from codec._c.traits import has_fixed_rate
from codec.encoding import bound
from codec.errors import SpecError
from codec.presets import resolve
from codec.specs import SpecLike

_LARGEST = 8 * ((1 << 32) - 1)  # maximum size of a frame in bytes


def frame_nbytes(shape: int | Iterable[int], dtype: Any, spec: SpecLike, *, segments: Any = None) -> int:
    """Return the exact size of a tensor's frame in bytes, for codecs of fixed rate.

    With such a codec, a rank can compute the sizes of all other ranks' frames, so that collectives need not exchange
    them.

    Parameters
    ----------
    shape : int or iterable of int
        Shape of the tensor.
    dtype : str, type or dtype
        Dtype of the tensor, as in :func:`bound`.
    spec : Spec or name of a preset
        :class:`Sign`, :class:`Quantize`, :class:`Float4`, :class:`Float8` without ``entropy``, or :class:`Ternary` with
        the packing "2bit" or "base3".
    segments : mapping, torch.nn.Module, or iterable of (int, tuple of int), optional
        Parameters inside a flat bucket, as in :func:`view`.

    Returns
    -------
    int
        Size in bytes of the frame that :func:`encode` returns for any tensor of this shape and dtype.

    Raises
    ------
    SpecError
        The size of a frame of this spec depends on the values: use :func:`bound`.
    ArgumentError
        The tensor cannot be encoded with this spec, or `segments` do not lie inside it.
    LimitError
        The frame would be larger than 32 GiB.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)
    >>> codec.frame_nbytes((64, 1000), "float32", codec.Quantize(4))
    36096
    >>> len(codec.encode(x, codec.Quantize(4)))
    36096
    """
    plain = resolve(spec)[0]
    if not has_fixed_rate(plain):
        raise SpecError(
            f"the size of a frame of {plain} depends on the values of the tensor: use bound(), which returns an upper "
            "bound"
        )
    nbytes = bound(shape, dtype, plain, segments=() if segments is None else segments)
    if nbytes > _LARGEST:
        check(lib.CODEC_LIMIT)
    return nbytes
