"""Any tensor as dtype, shape and address, without copying it; and the way back.

Nothing is imported that the caller has not: torch tensors and ml_dtypes arrays are known by their type's name.
"""

import ctypes
import importlib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from codec.core import DTYPES, ITEMSIZE, ffi
from codec.errors import EngineError, SpecError

_UINT = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_NUMPY = {name: np.dtype(name) for name in DTYPES if hasattr(np, name)}
_by_dtype: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _NUMPY.items()}


class TensorView(NamedTuple):
    """A C-contiguous tensor in host memory."""

    dtype: str
    shape: tuple[int, ...]
    data: Any  # C pointer
    nbytes: int
    owner: object  # keeps the memory alive

    @property
    def address(self) -> int:
        """Where the values are."""
        return int(ffi.cast("uintptr_t", self.data))


def _pointer(address: int) -> Any:
    return ffi.cast("uint8_t *", address)


def _numpy_pointer(x: np.ndarray[Any, Any]) -> Any:
    try:
        return ffi.from_buffer(x)
    except (ValueError, BufferError, TypeError):  # dtypes without a buffer, such as those of ml_dtypes
        return _pointer(x.__array_interface__["data"][0])


def _numpy_dtype_name(dtype: np.dtype[Any]) -> str:
    name = _by_dtype.get(dtype)
    if name is None:
        name = dtype.name
        if name not in DTYPES:
            raise SpecError(f"dtype {dtype} cannot be encoded; these can: {', '.join(DTYPES)}")
        _by_dtype[dtype] = name
    return name


def _refuse_masked(x: Any) -> None:
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(x, ma.MaskedArray) and ma.is_masked(x):
        raise SpecError("some values of this array are masked, which a frame cannot say: fill it first, by filled()")


def _from_numpy(x: np.ndarray[Any, Any]) -> TensorView:
    name = _by_dtype.get(x.dtype)
    if name is None:
        if not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
        name = _numpy_dtype_name(x.dtype)
    if not x.flags.c_contiguous:
        x = x.copy(order="C")
    shape = x.shape
    if len(shape) > 8:
        raise SpecError(f"rank {x.ndim} is above 8")
    return TensorView(name, shape, _numpy_pointer(x), x.nbytes, x)


def is_torch(x: object) -> TypeGuard[Any]:
    """Is it a torch tensor? Without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def _from_torch(x: Any) -> TensorView:
    torch: Any = sys.modules["torch"]
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SpecError(f"dtype {x.dtype} cannot be encoded; these can: {', '.join(DTYPES)}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested tensor" if x.is_nested else f"tensor of layout {x.layout}"
        raise SpecError(f"a {kind} cannot be encoded: make it dense, or encode its parts")
    if x.device.type != "cpu":
        raise EngineError(f"no engine for tensors on {x.device}; move it to the CPU first")
    _check_storage(x)
    x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    x = x.contiguous()
    if x.ndim > 8:
        raise SpecError(f"rank {x.ndim} is above 8")
    return TensorView(name, tuple(x.shape), _pointer(x.data_ptr()), x.numel() * x.element_size(), x)


def _check_storage(x: Any) -> None:
    """Torch itself does not look whether the memory that shape and strides speak of is there."""
    try:
        storage = x.untyped_storage()
        there = storage.nbytes() if storage.device.type == "cpu" else -1
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


def mark_written(out: Any) -> None:
    """Tell autograd that a tensor's values are others now."""
    if is_torch(out):
        sys.modules["torch"].autograd.graph.increment_version(out)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# (DLDataTypeCode, bits) that numpy does not know
_DLPACK = {
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}


_NO_ADDRESS = "a DLPack tensor that has values, but no address"


def _from_dlpack(x: Any) -> TensorView:
    if x.__dlpack_device__()[0] not in (1, 3):  # kDLCPU, kDLCUDAHost
        raise EngineError(f"no engine for tensors on device {x.__dlpack_device__()}; move it to the CPU first")
    try:
        array = np.from_dlpack(x)
    except (BufferError, RuntimeError):
        pass  # a dtype that numpy lacks
    else:
        if array.flags.owndata and array.nbytes:  # numpy allocates where it is given no address
            raise SpecError(_NO_ADDRESS)
        return _from_numpy(array)
    capsule = x.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = (ctypes.py_object, ctypes.c_char_p)
    t = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    name = _DLPACK.get((t.code, t.bits))
    if name is None or t.lanes != 1:
        raise SpecError(f"DLPack type (code {t.code}, {t.bits} bits, {t.lanes} lanes) cannot be encoded")
    shape = tuple(t.shape[i] for i in range(t.ndim))
    strides = tuple(t.strides[i] for i in range(t.ndim)) if t.strides else None
    itemsize, n = ITEMSIZE[name], int(np.prod(shape, dtype=np.int64))
    if n and not t.data:
        raise SpecError(_NO_ADDRESS)
    # as bits, from the lowest to the highest address that the strides reach
    reach = 1 + sum((s - 1) * abs(d) for s, d in zip(shape, strides, strict=True)) if strides and n else n
    memory: Any = (ctypes.c_uint8 * (reach * itemsize)).from_address(t.data + t.byte_offset) if n else b""
    flat = np.frombuffer(memory, _UINT[itemsize]) if n else None
    if flat is None:
        bits = np.empty(shape, _UINT[itemsize])
    elif strides is None:
        bits = flat.reshape(shape)
    else:
        bits = np.lib.stride_tricks.as_strided(flat, shape, [d * itemsize for d in strides])
    view = _from_numpy(bits)
    return view._replace(dtype=name, owner=(capsule, view.owner))


def view(x: Any, dtype: str | None = None) -> TensorView:
    """See x as a tensor.

    Parameters
    ----------
    x : array, tensor or buffer
        Anything with a buffer, ``__array_interface__`` or DLPack, in host memory.
    dtype : str, optional
        Take the bits of x, whose items must be as large, as values of this dtype.

    Raises
    ------
    SpecError
        x is not a tensor, or of a dtype or rank that cannot be encoded.
    EngineError
        x lies on a device without an engine.
    """
    if type(x) is np.ndarray:
        v = _from_numpy(x)
    elif is_torch(x):
        v = _from_torch(x)
    elif isinstance(x, np.ndarray | np.generic) or hasattr(x, "__array_interface__"):
        _refuse_masked(x)
        v = _from_numpy(np.asarray(x))
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        v = _from_dlpack(x)
    else:
        try:
            v = _from_numpy(np.asarray(memoryview(x)))
        except TypeError:
            raise SpecError(f"not a tensor: {type(x).__name__} has no buffer, array interface or DLPack") from None
    if dtype is None or dtype == v.dtype:
        return v
    if not isinstance(dtype, str) or dtype not in DTYPES:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"no such dtype: {dtype!r}; these are: {', '.join(DTYPES)}")
    if ITEMSIZE[dtype] != ITEMSIZE[v.dtype]:
        raise SpecError(f"{v.dtype} has {ITEMSIZE[v.dtype]} bytes an item, {dtype} has {ITEMSIZE[dtype]}")
    return v._replace(dtype=dtype)


def view_bytes(frame: Any) -> tuple[Any, int, object]:
    """Pointer to a frame, its size, and what keeps it alive."""
    if type(frame) is bytes:
        return ffi.from_buffer(frame), len(frame), frame
    v = view(frame)
    return v.data, v.nbytes, v.owner


def view_output(out: Any, dtype: str | None = None) -> TensorView:
    """See `out` as a tensor that can be written in place; as bits of `dtype` if it holds unsigned integers."""
    if is_torch(out):
        if not out.is_contiguous() or out.is_neg():
            raise SpecError("out= must be contiguous")
        v = _from_torch(out)
    else:
        array: np.ndarray[Any, Any]
        if isinstance(out, np.ndarray):
            _refuse_masked(out)
            array = out
        else:
            try:
                array = np.asarray(memoryview(out))
            except TypeError:
                raise SpecError(f"cannot write into {type(out).__name__}") from None
        if not array.flags.c_contiguous:
            raise SpecError("out= must be C-contiguous")
        if not array.flags.writeable:
            raise SpecError("out= is read-only")
        if not array.dtype.isnative:
            raise SpecError("out= must be in native byte order")
        v = _from_numpy(array)._replace(owner=array)
    if dtype and v.dtype != dtype and v.dtype == f"uint{8 * ITEMSIZE[dtype]}":
        v = v._replace(dtype=dtype)
    return v


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


def empty(dtype: str, shape: tuple[int, ...], like: Any = None) -> tuple[Any, TensorView]:
    """Make a tensor to decode into: of like's kind, or a numpy array."""
    if like is None and (known := _NUMPY.get(dtype)) is not None:
        array = np.empty(shape, known)
        return array, TensorView(dtype, shape, ffi.from_buffer(array), array.nbytes, array)
    if is_torch(like):
        torch: Any = sys.modules["torch"]
        if like.device.type != "cpu":
            raise EngineError(
                f"no engine for tensors on {like.device}; decode without like=, then move the result there"
            )
        t = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        return t, _from_torch(t)
    device = getattr(like, "__dlpack_device__", None)
    if device is not None and device()[0] not in (1, 3):
        raise EngineError(f"no engine for tensors on device {device()}; decode without like=")
    if dtype in _NUMPY:
        return empty(dtype, shape)
    if isinstance(like, np.ndarray) and like.dtype == _UINT[ITEMSIZE[dtype]]:
        array = np.empty(shape, like.dtype)
    else:
        try:
            array = np.empty(shape, getattr(importlib.import_module("ml_dtypes"), dtype))
        except ImportError:
            raise EngineError(
                f"numpy has no {dtype}: install ml_dtypes, or pass like= a torch tensor, "
                f"or out= or like= an array of {_UINT[ITEMSIZE[dtype]]} for the bits"
            ) from None
    return array, _from_numpy(array)._replace(dtype=dtype)
