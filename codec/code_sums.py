"""Integer sums of the codes of Ternary frames that share a scale."""

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np

from codec._options import CallOptions, settings_of
from codec.decoding import decode_request, engine_for
from codec.errors import ArgumentError
from codec.inspection import views_of

Tensor = TypeVar("Tensor")
IntArray = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


@overload
def sum_codes(
    frames: Sequence[Any],
    *,
    like: None = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> tuple[IntArray, float]: ...
@overload
def sum_codes(
    frames: Sequence[Any],
    *,
    like: Tensor,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> tuple[Tensor, float]: ...
def sum_codes(
    frames: Sequence[Any],
    *,
    like: Any = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> tuple[Any, float]:
    """Add the codes of Ternary frames that share one scale, as integers.

    A value of :class:`Ternary` is its scale times a code, -1, 0 or 1. If all frames have the same scale, the sum of
    values is the scale times the sum of codes, which is exact and does not depend on the order. A server can send these
    integers, encoded with :class:`Lossless` for example, in a fraction of the bytes of a float32 sum.

    Parameters
    ----------
    frames : sequence of bytes or buffers
        One or more frames of :class:`Ternary`, of one shape, dtype and scale, in any packing. Encode them with one
        ``Ternary(scale=...)``, such as the largest magnitude of all ranks. Frames with segments are accepted if all
        segments have that scale.
    like : array or tensor, optional
        Example of the result's type, such as a torch tensor. Its dtype and shape are ignored.
    max_nbytes : int, optional
        Upper bound of the size of the result, in bytes. Default: 1 GiB, or 256 times the size of the largest frame if
        that is more.
    options : CallOptions, optional
        Engine, "native" or "numba", and threads, made by :func:`options`. The frames must be in host memory. The engine
        "cuda" does not add codes.

    Returns
    -------
    integers : numpy.ndarray, or a tensor of the kind of `like`
        Sums of the codes, with the frames' shape: int8 for at most 127 frames, int16 for at most 32,767, otherwise
        int32.
    scale : float
        Scale of the frames, 0.0 for tensors without values. The mean is ``integers * (scale / len(frames))``.

    Raises
    ------
    FrameError
        As in :func:`decode`, for the first frame that has an error. Its ``item`` is the index of that frame, with which
        the message begins.
    ArgumentError
        There are no frames, or one is not of :class:`Ternary` or differs from the first one in shape, dtype or scale.
        The error's ``item`` is the index of that frame. If any frame is damaged, FrameError is raised instead.
    EngineError
        A frame or `like` is on a GPU, the engine is "cuda", or the engine cannot be used on this machine. Copy frames
        of a GPU to host memory first.

    Examples
    --------
    >>> gradients = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    >>> spec = codec.Ternary("base3", scale=float(abs(gradients).max()))
    >>> frames = [codec.encode(x, spec, stream=rank) for rank, x in enumerate(gradients)]
    >>> integers, scale = codec.sum_codes(frames)
    >>> integers.dtype, integers.min() >= -3, integers.max() <= 3
    (dtype('int8'), np.True_, np.True_)
    >>> bool((integers * np.float32(scale) == codec.reduce(frames, op="sum")).all())
    True
    """
    settings = settings_of(options)
    views = views_of(frames)
    if not views:
        raise ArgumentError("frames is empty: pass at least one frame")
    r = decode_request(views, None, settings, None, like, None, max_nbytes)
    return engine_for(settings.engine, views[0], None, like).sum_codes(r)
