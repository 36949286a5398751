"""PageCodec: pages of a KV cache to bytes and back."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from codec._c.library import DTYPES, ITEMSIZE
from codec._options import CallOptions
from codec.arguments import whole
from codec.batch import decode_many, encode_many
from codec.encoding import bound, checked_shape
from codec.errors import ArgumentError, FrameError, SpecError, StateError
from codec.inspection import inspect
from codec.kv.container import PageLayout, head_nbytes, pack, page_nbytes, unpack
from codec.presets import resolve
from codec.specs import Delta, Float4, Float8, Lossless, Quantize, Spec, SpecLike
from codec.tensors.view import Array, dtype_name, empty, is_torch, kind_of, mark_written, on_host
from codec.tensors.view import view as view_tensor
from codec.tensors.wrapper import view

_DTYPE_AT = 6  # offset of the dtype's number in a frame
_GROUPED = (Quantize, Float8, Float4)
Place = tuple[int, int, str]  # page, layer, "key" or "value"


class PageCodec:
    """Codec of the pages of a KV cache: a frame for each layer's keys, and one for its values.

    Provisional: may change in any version.

    In keys, a few channels have large values, and these channels are the same for all tokens. Therefore specs with
    scales group keys along tokens and values along channels [1]_. All values in a group of keys often have the same
    sign: quantize keys with a zero point.

    Parameters
    ----------
    shape : iterable of int
        Shape of a page: (layers, sides, tokens, channels), or (layers, sides, tokens, heads, channels of a head).
        sides: 2 for keys and values; 1 for one latent tensor, which is encoded as values are.
    dtype : str, type or dtype, default "bfloat16"
        Dtype of the values.
    key, value : Spec or name of a preset, default "lossless"
        Spec of the keys, and of the values: :class:`Lossless`, :class:`Quantize`, :class:`Float8` or :class:`Float4`.
        Quantize should round to nearest, and have a zero point, which halves the error of attention at 4 bits.

    Raises
    ------
    ArgumentError
        `shape` is not the shape of a page, or a spec does not accept the dtype.
    SpecError
        A spec of another class, or a `group_size` that does not divide the length of a row: the number of tokens for
        keys, the number of channels for values. If `group_size` exceeds that length, a group is a whole row.

    Notes
    -----
    The keys, and the values, of a layer in a page should have 4,096 values or more, so that :class:`Lossless` can use
    offsets of rows and columns. The format of an encoded page is in ``docs/guides/kv-caches.md``.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024.

    Examples
    --------
    >>> page = np.random.default_rng(0).standard_normal((2, 2, 64, 8, 32), np.float32)
    >>> eight = codec.Quantize(8, rounding="nearest", zero_point=True)
    >>> pages = codec.kv.PageCodec(page.shape, "float32", key=eight)
    >>> data = pages.encode(page)
    >>> again = pages.decode(data)
    >>> bool((again[:, 1] == page[:, 1]).all()), float(abs(again - page).max()) < 0.02, len(data) <= pages.bound
    (True, True, True)
    """

    page_nbytes = staticmethod(page_nbytes)

    def __init__(
        self,
        shape: Iterable[int],
        dtype: Any = "bfloat16",
        *,
        key: SpecLike = "lossless",
        value: SpecLike = "lossless",
    ) -> None:
        self.shape = checked_shape(shape)
        self.dtype = dtype_name(dtype)
        if len(self.shape) < 4 or self.shape[1] not in (1, 2) or 0 in self.shape:
            raise ArgumentError(f"shape must be (layers, 1 or 2, tokens, channels, ...) without a 0, got {self.shape}")
        layers, sides, tokens = self.shape[:3]
        self._channels = math.prod(self.shape[3:])
        self._key = _spec("key", key, tokens, self.shape, self.dtype)
        self._value = _spec("value", value, self._channels, self.shape, self.dtype)
        self._layout = PageLayout(layers, sides, sides == 2 and isinstance(self._key, _GROUPED))
        specs = (self._key, self._value)[2 - sides :]
        rows = [self._rows(self._layout, side) for side in range(sides)]
        sizes = [bound(shape, self.dtype, spec, segments=()) for shape, spec in zip(rows, specs, strict=True)]
        #: Upper bound of the size of an encoded page in bytes; slots of this size are always large enough.
        self.bound: int = head_nbytes(self._layout.frames) + layers * sum(sizes)

    def __repr__(self) -> str:
        return f"PageCodec({self.shape}, {self.dtype!r}, key={self._key}, value={self._value})"

    @property
    def nbytes(self) -> int:
        """Size of an uncompressed page in bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def encode(self, page: Any, *, options: CallOptions | None = None) -> bytes:
        """Encode one page; see :meth:`encode_many`."""
        return self.encode_many([page], options=options)[0]

    def encode_many(
        self, pages: Iterable[Any], *, out: Any = None, stream: int = 0, options: CallOptions | None = None
    ) -> list[Any]:
        """Encode pages, such as those of a paged pool, in one batch.

        Parameters
        ----------
        pages : iterable of arrays or tensors
            Pages in host memory, of the codec's shape, and of its dtype or with the same bits as unsigned integers. Any
            strides are accepted, such as those of a transposed view of a pool; only values that are not contiguous are
            copied.
        out : writable array of uint8, shape (pages, bytes of a slot), optional
            Slots for the encoded pages. Slots of :attr:`bound` bytes are always large enough.
        stream : int
            Number of the stream of random bits, for stochastic rounding, as in :func:`codec.encode_many`.
        options : CallOptions, optional
            Engine and threads.

        Returns
        -------
        list of bytes, or of memoryview of each slot's used part

        Raises
        ------
        ArgumentError
            A page has another shape or dtype, values to be quantized include NaN or Inf, or a slot is too small. If
            values are at fault, the error's ``item`` is (index of the page, layer, "key" or "value").
        EngineError
            A page is not in host memory.
        """
        given = [self._bits(page, f"page {i}") for i, page in enumerate(pages)]
        tensors: dict[Place, Any] = {}
        specs: dict[Place, Spec] = {}
        for i, page in enumerate(given):
            sides = [self._layers(side, page[:, side]) for side in range(self.shape[1])]
            for layer in range(len(page)):
                for kind, arrays in zip(self._layout.kinds, sides, strict=True):
                    tensors[i, layer, kind] = view(arrays[layer], self.dtype)
                    specs[i, layer, kind] = self._key if kind == "key" else self._value
        n, frames = self._layout.frames, list(encode_many(tensors, specs, stream=stream, options=options).values())
        data = [pack(self._layout, frames[i : i + n]) for i in range(0, len(frames), n)]
        return data if out is None else _fill(out, data)

    def decode(self, data: Any, *, out: Any = None, options: CallOptions | None = None) -> Any:
        """Decode one page; see :meth:`decode_many`. Without `out`, return a numpy array."""
        return self.decode_many([data], out=None if out is None else [out], options=options)[0]

    def decode_many(
        self, data: Iterable[Any], *, out: Iterable[Any] | None = None, options: CallOptions | None = None
    ) -> list[Any]:
        """Decode pages of this shape and dtype. The specs with which they were encoded may differ from this codec's.

        Parameters
        ----------
        data : iterable of bytes or buffers
            Encoded pages without trailing bytes; :meth:`page_nbytes` returns the size of a page in a larger slot.
        out : iterable of arrays or tensors, optional
            Destinations in host memory, with any strides, that do not overlap. After an error all of them are
            unchanged.
        options : CallOptions, optional
            Engine and threads.

        Returns
        -------
        list
            `out`, or new numpy arrays; new arrays of bfloat16 or float8 need ml_dtypes.

        Raises
        ------
        FrameError
            A page is damaged, or has another shape or dtype. If one of its frames is at fault, the error's ``item`` is
            (index of the page, layer, "key" or "value").
        ArgumentError
            A page of `out` has another shape or dtype, or shares memory with another one.
        EngineError
            A page of `out` is not in host memory, or numpy has no dtype for new arrays.
        """
        blobs = list(data)
        given = [empty(self.dtype, self.shape)[0] for _ in blobs] if out is None else list(out)
        if len(given) != len(blobs):
            raise ArgumentError(f"out= must have {len(blobs)} pages, as many as data, got {len(given)}")
        targets = [self._bits(page, f"page {i} of out=", True) for i, page in enumerate(given)]
        frames: dict[Place, Array] = {}
        into: dict[Place, Array] = {}
        later: list[tuple[Array, Array]] = []
        for number, (blob, page) in enumerate(zip(blobs, targets, strict=True)):
            layout, parts = unpack(blob, *self.shape[:2])
            sides = [self._destinations(layout, side, page[:, side], later) for side in range(self.shape[1])]
            kinds = list(zip(layout.kinds, sides, strict=True))
            places = [((number, i, kind), arrays[i]) for i in range(len(page)) for kind, arrays in kinds]
            for frame, (place, array) in zip(parts, places, strict=True):
                if not _has_dtype(frame, self.dtype):
                    raise FrameError(f"{place}: the frame is damaged, or the dtype of the page is not {self.dtype}")
                frames[place], into[place] = frame, array
        try:
            decode_many(frames, out=into, options=options)
        except (ArgumentError, StateError) as e:
            if isinstance(e, ArgumentError) and all(map(_fits, frames.values(), into.values())):
                raise  # all frames fit their destinations, so the error is about pages of out= that overlap
            raise FrameError(f"the page does not have dtype {self.dtype} and shape {self.shape}: {e}") from e
        for values, decoded in later:
            values[...] = decoded.reshape(values.shape)
        for page in given:
            mark_written(page)
        return given

    def _rows(self, layout: PageLayout, side: int) -> tuple[int, int]:
        """Return the shape of each frame of one side (keys or values) of a page."""
        transposed = layout.transposed and side == 0
        return (self._channels, self.shape[2]) if transposed else (self.shape[2], self._channels)

    def _layers(self, side: int, values: Array) -> Sequence[Array]:
        """Return, for each layer, a contiguous array of one side (keys or values) of a page, to be encoded."""
        shape = self._rows(self._layout, side)
        if self._layout.transposed and side == 0:
            return list(np.ascontiguousarray(np.moveaxis(values, 1, -1)).reshape(-1, *shape))
        return [np.ascontiguousarray(layer).reshape(shape) for layer in values]

    def _destinations(
        self, layout: PageLayout, side: int, values: Array, later: list[tuple[Array, Array]]
    ) -> Sequence[Array]:
        """Return the array into which each layer of a side is decoded.

        If a page's own memory cannot be used, because it is not contiguous or transposed, temporary arrays are
        returned, and (destination, temporary) is appended to `later` for copying after decoding.
        """
        shape = self._rows(layout, side)
        transposed = layout.transposed and side == 0
        if not transposed and values[0].flags.c_contiguous:
            return [layer.reshape(shape) for layer in values]
        decoded = np.empty((len(values), *shape), values.dtype)
        later.append((np.moveaxis(values, 1, -1) if transposed else values, decoded))
        return list(decoded)

    def _bits(self, page: Any, name: str, write: bool = False) -> Array:
        """Return a page as an array of unsigned integers that shares its memory."""
        unsigned = f"uint{8 * ITEMSIZE[self.dtype]}"
        if is_torch(page):
            torch: Any = sys.modules["torch"]
            if page.device.type != "cpu":
                on_host(name, view_tensor(page[:0]))
            if page.is_neg():
                raise ArgumentError(f"{name} is lazily negated: pass its resolve_neg()")
            own = dtype_name(page.dtype)
            array: Any = page.detach().view(getattr(torch, unsigned)).numpy() if own in (self.dtype, unsigned) else None
        elif isinstance(page, np.ndarray):
            whose = cast(Array, page)
            own = dtype_name(whose.dtype)
            array = whose.view(unsigned) if own in (self.dtype, unsigned) and whose.dtype.isnative else None
        else:
            raise ArgumentError(f"{name} must be a numpy array or a torch tensor, got {kind_of(page)}")
        if array is None or array.shape != self.shape:
            given = tuple(cast(Any, page).shape)
            raise ArgumentError(f"{name} must be {self.dtype} of shape {self.shape}, got {own} of shape {given}")
        if write and not array.flags.writeable:
            raise ArgumentError(f"{name} is read-only")
        return array


def _spec(name: str, given: SpecLike, row: int, shape: tuple[int, ...], dtype: str) -> Spec:
    """Check a spec, and return it with `group_size` limited to `row`, the number of values of a row."""
    spec, bound_to = resolve(given)
    if bound_to is not None or not isinstance(spec, Lossless | Quantize | Float8 | Float4):
        raise SpecError(f"{name}= must be Lossless, Quantize, Float8 or Float4, got {spec}")
    bound(shape, dtype, spec)  # raises an error if the spec does not accept the dtype
    if isinstance(spec, Lossless | Float4) or spec.group_size is None or (isinstance(spec, Float8) and spec.is_mx):
        return spec
    if spec.group_size < row and row % spec.group_size:
        what = "tokens" if name == "key" else "channels"
        raise SpecError(f"{name}={spec}: group_size must divide the number of {what} of a page, {row}, or be larger")
    return replace(spec, group_size=min(spec.group_size, row))


def _has_dtype(frame: Array, dtype: str) -> bool:
    """Return True if a frame's header has this dtype. Decoding to integers would accept any dtype of that size."""
    return len(frame) > _DTYPE_AT and int(frame[_DTYPE_AT]) == DTYPES[dtype]


def _fits(frame: Array, into: Array) -> bool:
    """Return True if a frame's tensor has the shape and size of its destination, and needs no base."""
    info = inspect(frame)
    sizes_fit = info.shape == into.shape and info.tensor_nbytes == into.nbytes
    return sizes_fit and not isinstance(info.spec, Delta)


def _fill(out: Any, data: Sequence[bytes]) -> list[memoryview]:
    """Copy each encoded page into its slot."""
    slots = np.asarray(out)
    if slots.ndim != 2 or slots.dtype != np.uint8 or len(slots) != len(data) or not slots.flags.writeable:
        raise ArgumentError(
            f"out= must be a writable uint8 array of shape ({len(data)}, bytes of a slot), got {slots.dtype} of shape "
            f"{slots.shape}"
        )
    if not slots.flags.c_contiguous:
        raise ArgumentError("out= must be C-contiguous")
    whole("the size of a slot", slots.shape[1], max(map(len, data), default=0), 1 << 62)
    for slot, page in zip(slots, data, strict=True):
        slot[: len(page)] = np.frombuffer(page, np.uint8)
    return [memoryview(slot[: len(page)]).toreadonly() for slot, page in zip(slots, data, strict=True)]
