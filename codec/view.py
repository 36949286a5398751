"""Any tensor as dtype, shape and address, without copying it; and the way back.

Nothing is imported that the caller has not: torch tensors and ml_dtypes arrays are known by their type's name. Tensors
on a device are described like all others; whether they can be read is for an engine to say.
"""

import bisect
import importlib
import itertools
import sys
from collections.abc import Iterable
from ctypes import c_uint8
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np

from codec.core import DTYPES, ITEMSIZE, ffi
from codec.dlpack import Exported, device_name, device_of, from_cuda_array_interface, from_dlpack, is_contiguous
from codec.errors import EngineError, SpecError

Array = np.ndarray[Any, Any]

_UINT = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_NUMPY = {name: np.dtype(name) for name in DTYPES if hasattr(np, name)}
_by_dtype: dict[Any, str] = {dtype: name for name, dtype in _NUMPY.items()}
_CAN = f"these can: {', '.join(DTYPES)}"
_MAX_RANK = 8
_UINTPTR = ffi.typeof("uintptr_t")
_BYTES = ffi.typeof("uint8_t *")
_CHARS = ffi.typeof("char[]")


new: Any = cast(Any, tuple).__new__  # makes a NamedTuple in half the time of its own: every small call makes three


class TensorView(NamedTuple):
    """A C-contiguous tensor, wherever it lies."""

    dtype: str
    shape: tuple[int, ...]
    data: Any  # C pointer, on the tensor's device
    nbytes: int
    owner: object  # keeps the memory alive
    device: str = "cpu"
    stream: int | None = None  # CUDA: on which the values are ready; None: they are so already

    @property
    def address(self) -> int:
        """Where the values are."""
        return int(ffi.cast(_UINTPTR, self.data))

    def first(self, nbytes: int) -> "TensorView":
        """Of bytes the first ones, at most so many."""
        n = min(self.nbytes, nbytes)
        return self._replace(shape=(n,), nbytes=n)


def _pointer(address: int) -> Any:
    return ffi.cast(_BYTES, address)


def _check_rank(rank: int) -> None:
    if rank > _MAX_RANK:
        raise SpecError(f"rank {rank} is above {_MAX_RANK}")


def dtype_name(dtype: Any) -> str:
    """Our name of a dtype: a name or type as numpy takes it, or one of numpy's, ml_dtypes' or torch's dtypes.

    Raises
    ------
    SpecError
        It is not a dtype, or one that cannot be encoded.
    """
    try:
        if (name := _by_dtype.get(dtype)) is not None:
            return name
    except TypeError:  # cannot be looked up
        pass
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    if name not in DTYPES:
        try:
            name = np.dtype(dtype).name
        except (TypeError, ValueError, SyntaxError):
            name = ""
    if dtype is None or name not in DTYPES:
        raise SpecError(f"dtype {dtype} cannot be encoded; {_CAN}")
    return name


def _refuse_masked(x: Any) -> None:
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(x, ma.MaskedArray) and ma.is_masked(x):
        raise SpecError("some values of this array are masked, which a frame cannot say: fill it first, by filled()")


def _from_numpy(x: Array) -> TensorView:
    name = _by_dtype.get(x.dtype)
    if name is None:
        if not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
        _by_dtype[x.dtype] = name = dtype_name(x.dtype)
    shape = x.shape
    if len(shape) > _MAX_RANK:
        _check_rank(len(shape))
    try:
        data = ffi.from_buffer(x)
    except (ValueError, BufferError, TypeError):  # not contiguous, or a dtype without a buffer, such as ml_dtypes'
        if not x.flags.c_contiguous:
            x = x.copy(order="C")
        data = _pointer(x.__array_interface__["data"][0])
    return new(TensorView, (name, shape, data, x.nbytes, x, "cpu", None))


def is_torch(x: object) -> TypeGuard[Any]:
    """Is it a torch tensor? Without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def _from_torch(x: Any) -> TensorView:
    torch: Any = sys.modules["torch"]
    name = _by_dtype.get(x.dtype)
    if name is None:
        _by_dtype[x.dtype] = name = dtype_name(x.dtype)
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested tensor" if x.is_nested else f"tensor of layout {x.layout}"
        raise SpecError(f"a {kind} cannot be encoded: make it dense, or encode its parts")
    device = x.device
    _check_storage(x, device.type)
    x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    x = x.contiguous()
    shape = tuple(x.shape)
    _check_rank(len(shape))
    nbytes, address = x.numel() * ITEMSIZE[name], x.data_ptr()
    if nbytes and not address and device.type != "meta":  # others hold the values of this one
        raise SpecError(
            f"a {type(x).__name__} that has no memory of its own: encode what holds its values; "
            "of a DTensor that is .to_local()"
        )
    if device.type == "cpu":
        return TensorView(name, shape, _pointer(address), nbytes, x)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    return TensorView(name, shape, _pointer(address), nbytes, x, str(device), stream)


def _check_storage(x: Any, device: str) -> None:
    """Torch itself does not look whether the memory that shape and strides speak of is there."""
    try:
        storage = x.untyped_storage()
        there = storage.nbytes() if storage.device.type == device else -1
    except (RuntimeError, NotImplementedError):
        there = -1
    if there < 0:
        raise SpecError(
            "this tensor has no memory of its own: under torch.func's transforms, such as vmap and grad, "
            "and in traced code tensors cannot be encoded or decoded to"
        )
    if not x.numel():
        return
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    if (last + 1) * x.element_size() > there:
        raise SpecError(
            f"a tensor of shape {tuple(x.shape)} over a storage of {there} bytes, which is too small for it"
        )


def is_cupy(x: object) -> TypeGuard[Any]:
    """Is it a CuPy array? Without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, getattr(cupy, "ndarray", ()))


def _from_cupy(x: Any) -> TensorView:
    """By itself, not by DLPack: that would have it ready on a stream which others do not wait for."""
    cupy: Any = sys.modules["cupy"]
    name = dtype_name(x.dtype)
    _check_rank(x.ndim)
    with x.device:
        x = cupy.ascontiguousarray(x) if x.ndim else x
        stream = cupy.cuda.get_current_stream().ptr
    return TensorView(name, x.shape, _pointer(x.data.ptr), x.nbytes, x, f"cuda:{x.device.id}", stream)


def mark_written(out: Any) -> None:
    """Tell autograd that a tensor's values are others now."""
    if type(out) is not np.ndarray and is_torch(out):
        sys.modules["torch"].autograd.graph.increment_version(out)


def _from_dlpack(x: Any) -> TensorView:
    if device_name(x.__dlpack_device__()) != "cpu":
        return _from_exported(from_dlpack(x))
    try:
        array = np.from_dlpack(x)
    except (BufferError, RuntimeError):  # a dtype that numpy lacks
        return _from_exported(from_dlpack(x))
    if array.flags.owndata and array.nbytes:  # numpy allocates where it is given no address
        raise SpecError(_NO_ADDRESS)
    return _from_numpy(array)


_NO_ADDRESS = "a DLPack tensor that has values, but no address"


def _from_exported(e: Exported) -> TensorView:
    if e.dtype not in DTYPES:
        raise SpecError(f"dtype {e.dtype} cannot be encoded; {_CAN}")
    _check_rank(len(e.shape))
    nbytes = ITEMSIZE[e.dtype] * int(np.prod(e.shape, dtype=np.int64))
    if nbytes and not e.address:
        raise SpecError(_NO_ADDRESS)
    if is_contiguous(e):
        return TensorView(e.dtype, e.shape, _pointer(e.address), nbytes, e.owner, e.device, e.stream)
    if e.device != "cpu":
        raise SpecError(f"a tensor on {e.device} whose values do not follow each other: make it contiguous first")
    # as bits, from the lowest to the highest address that the strides reach
    strides = e.strides or ()
    reach = e.itemsize + sum((n - 1) * abs(stride) for n, stride in zip(e.shape, strides, strict=True))
    memory: Any = (c_uint8 * reach).from_address(e.address)
    bits = np.lib.stride_tricks.as_strided(np.frombuffer(memory, _UINT[e.itemsize]), e.shape, strides)
    v = _from_numpy(bits)
    return v._replace(dtype=e.dtype, owner=(e.owner, v.owner))


def view(x: Any, dtype: Any = None) -> TensorView:
    """See x as a tensor.

    Parameters
    ----------
    x : array, tensor or buffer
        Anything with a buffer, ``__array_interface__``, DLPack or ``__cuda_array_interface__``.
    dtype : str, type or dtype, optional
        Take the bits of x, whose items must be as large, as values of this dtype.

    Raises
    ------
    SpecError
        x is not a tensor, or of a dtype or rank that cannot be encoded.
    """
    if type(x) is np.ndarray:
        v = _from_numpy(x)  # pyright: ignore[reportUnknownArgumentType] - a cast would be a call
    elif is_torch(x):
        v = _from_torch(x)
    elif is_cupy(x):
        v = _from_cupy(x)
    elif isinstance(x, type):
        raise SpecError(f"not a tensor: {kind_of(x)}")
    elif isinstance(x, np.ndarray | np.generic) or hasattr(x, "__array_interface__"):
        _refuse_masked(x)
        v = _from_numpy(np.asarray(cast(Any, x)))
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        v = _from_dlpack(x)
    elif hasattr(x, "__cuda_array_interface__"):
        v = _from_exported(from_cuda_array_interface(x))
    else:
        try:
            v = _from_numpy(np.asarray(memoryview(x)))
        except TypeError:
            raise SpecError(f"not a tensor: {kind_of(x)} has no buffer, array interface or DLPack") from None
    if dtype is None:
        return v
    name = dtype if type(dtype) is str and dtype in DTYPES else dtype_name(dtype)
    if ITEMSIZE[name] != ITEMSIZE[v.dtype]:
        raise SpecError(f"{v.dtype} has {ITEMSIZE[v.dtype]} bytes an item, {name} has {ITEMSIZE[name]}")
    return v._replace(dtype=name)


def view_bytes(frame: Any) -> TensorView:
    """See a frame as bytes."""
    if type(frame) is memoryview and frame.nbytes and frame.c_contiguous:
        # not by itself: CPython crashes if it collects a memoryview whose buffer is in use, as after an error whose
        # traceback refers to itself; an array does not use it
        frame = np.frombuffer(frame, np.uint8)
    elif type(frame) is not bytes:
        v = view(frame)
        return v._replace(dtype="uint8", shape=(v.nbytes,))
    data = ffi.from_buffer(frame)
    n = len(frame)
    return new(TensorView, ("uint8", (n,), data, n, frame, "cpu", None))


def view_output(out: Any, dtype: str | None = None, name: str = "out=") -> TensorView:
    """See an argument as a tensor that can be written in place; as bits of `dtype` if it holds unsigned integers.

    Raises
    ------
    SpecError
        It cannot be written, or is not contiguous.
    """
    if type(out) is np.ndarray:
        v = _from_own(out, name)  # pyright: ignore[reportUnknownArgumentType] - a cast would be a call
    elif is_torch(out):
        v = _from_torch(out)
        if not out.is_contiguous() or out.is_neg():
            raise SpecError(f"{name} must be contiguous")
    elif is_cupy(out):
        if not out.flags.c_contiguous:
            raise SpecError(f"{name} must be C-contiguous")
        v = _from_cupy(out)
    elif isinstance(out, np.ndarray):
        _refuse_masked(out)
        v = _from_own(cast(Array, out), name)
    elif (device := device_of(out)) != "cpu":
        e = from_cuda_array_interface(out) if hasattr(out, "__cuda_array_interface__") else from_dlpack(out)
        if e.readonly:
            raise SpecError(f"{name} is read-only")
        v = _from_exported(e)._replace(device=device)
    else:
        try:
            v = _from_own(np.asarray(memoryview(out)), name)
        except TypeError:
            raise SpecError(f"{name} must be an array or tensor to write to, not {kind_of(out)}") from None
    if dtype and v.dtype != dtype and v.dtype == f"uint{8 * ITEMSIZE[dtype]}":
        v = v._replace(dtype=dtype)
    return v


def kind_of(x: object) -> str:
    """What something is that should be something else, for a message."""
    return f"the class {x.__name__}" if isinstance(x, type) else type(x).__name__


def _from_own(array: Array, argument: str) -> TensorView:
    """An array whose own memory is meant, never a copy."""
    name = _by_dtype.get(array.dtype)
    if name is not None and array.ndim <= _MAX_RANK:
        try:
            data = ffi.from_buffer(_CHARS, array, True)  # contiguous and writable
        except (ValueError, BufferError, TypeError):
            pass
        else:
            return new(TensorView, (name, array.shape, data, array.nbytes, array, "cpu", None))
    flags = array.flags
    if not flags.c_contiguous:
        raise SpecError(f"{argument} must be C-contiguous")
    if not flags.writeable:
        raise SpecError(f"{argument} is read-only")
    if not array.dtype.isnative:
        raise SpecError(f"{argument} must be in native byte order")
    return _from_numpy(array)


def on_host(name: str, v: TensorView, who: str = "this") -> TensorView:
    """The view, if the host can read it.

    Raises
    ------
    EngineError
        It lies on a device.
    """
    if v.device != "cpu":
        raise EngineError(refusal(name, v.device, who))
    return v


def fetch(name: str, v: TensorView, nbytes: int | None = None) -> TensorView:
    """Bytes in host memory, all or the first ones: copied there if they lie on a device.

    Raises
    ------
    EngineError
        They cannot be: the array is neither torch's nor CuPy's.
    """
    if v.device == "cpu":
        return v
    x: Any = v.owner
    if not is_torch(x) and not hasattr(x, "get"):
        return on_host(name, v)
    x = x.reshape(-1)[: -(-(v.nbytes if nbytes is None else nbytes) // ITEMSIZE[v.dtype])]
    array = x.cpu().numpy() if is_torch(x) else np.asarray(x.get())
    return view_bytes(array)


def refusal(name: str, device: str, who: str) -> str:
    """Why the host does not read what lies on a device, and what helps."""
    if device == "meta":
        return f"{name} lies on meta, where tensors have no values"
    return f"{name} lies on {device}, which {who} cannot read: copy it to host memory first, such as by .cpu()"


def check_apart(name: str, written: TensorView, others: Iterable[tuple[str, TensorView, bool]]) -> None:
    """Raise SpecError if a tensor that will be written shares memory with others.

    Parameters
    ----------
    name : str
        The argument to be written.
    written : TensorView
    others : iterable of (str, TensorView, bool)
        Other arguments, and whether `written` may be the very same values.
    """
    begin = written.address
    for other, v, same in others:
        at = v.address
        if begin < at + v.nbytes and at < begin + written.nbytes:
            if same and at == begin and v.nbytes == written.nbytes and v.dtype == written.dtype:
                continue
            but = f" without being {other} itself" if same else ""
            raise SpecError(f"{name} shares memory with {other}{but}")


def check_all_apart(
    name: str, written: Iterable[tuple[int, TensorView]], read: Iterable[tuple[int, TensorView]]
) -> None:
    """Raise SpecError if one of many tensors to be written shares memory with another, or with what is read for others.

    Parameters
    ----------
    name : str
        The argument to be written.
    written, read : iterable of (int, TensorView)
        With the number of the item that each belongs to, within which reading and writing may meet.
    """
    spans = sorted((v.address, v.address + v.nbytes, i) for i, v in written if v.nbytes)
    for (_, end, i), (begin, _, j) in itertools.pairwise(spans):
        if begin < end:
            raise SpecError(f"{name} of items {min(i, j)} and {max(i, j)} shares memory")
    ends = [end for _, end, _ in spans]
    for i, v in read:
        begin = v.address
        k = bisect.bisect_right(ends, begin)
        while k < len(spans) and spans[k][0] < begin + v.nbytes:
            if i != spans[k][2]:
                raise SpecError(f"{name} of item {spans[k][2]} shares memory with what item {i} is read from")
            k += 1


def device_like(like: Any) -> str:
    """Where a tensor such as `like` would be."""
    if like is None or type(like) is np.ndarray:
        return "cpu"
    if not is_torch(like):
        return device_of(like)
    device = like.device
    return "cpu" if device.type == "cpu" else str(device)


def _check_kind(like: Any) -> None:
    known = hasattr(like, "__array_interface__") or hasattr(like, "__dlpack__")
    try:
        if isinstance(like, type) or not known:
            memoryview(cast(Any, like))
    except TypeError:
        raise SpecError(f"like= must be an array or tensor, not {kind_of(like)}") from None


def empty(dtype: str, shape: tuple[int, ...], like: Any = None) -> tuple[Any, TensorView]:
    """Make a tensor to decode into, in host memory: of like's kind, or a numpy array."""
    if like is None and (known := _NUMPY.get(dtype)) is not None:
        array = np.empty(shape, known)
        return array, new(TensorView, (dtype, shape, ffi.from_buffer(array), array.nbytes, array, "cpu", None))
    if is_torch(like):
        torch: Any = sys.modules["torch"]
        t = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")  # whatever torch's default is
        return t, _from_torch(t)
    if not isinstance(like, np.ndarray | None):
        _check_kind(like)
    if dtype in _NUMPY:
        return empty(dtype, shape)
    if isinstance(like, np.ndarray) and cast(Array, like).dtype == _UINT[ITEMSIZE[dtype]]:
        array = np.empty(shape, cast(Array, like).dtype)
    else:
        try:
            array = np.empty(shape, getattr(importlib.import_module("ml_dtypes"), dtype))
        except ImportError:
            raise EngineError(
                f"numpy has no {dtype}: install ml_dtypes, or pass like= a torch tensor, "
                f"or out= or like= an array of {_UINT[ITEMSIZE[dtype]]} for the bits"
            ) from None
    return array, _from_numpy(array)._replace(dtype=dtype)
