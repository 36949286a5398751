"""Any tensor as dtype, shape and address, without copying it; and the way back.

Nothing is imported that the caller has not: torch tensors and ml_dtypes arrays are known by their type's name.
"""

import ctypes
import importlib
import sys
from typing import Any, NamedTuple

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


def _from_numpy(x: np.ndarray[Any, Any]) -> TensorView:
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    name = _numpy_dtype_name(x.dtype)
    if not x.flags.c_contiguous:
        x = x.copy(order="C")
    if x.ndim > 8:
        raise SpecError(f"rank {x.ndim} is above 8")
    return TensorView(name, x.shape, _numpy_pointer(x), x.nbytes, x)


def is_torch(x: object) -> bool:
    """Is it a torch tensor? Without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def _from_torch(x: Any) -> TensorView:
    torch: Any = sys.modules["torch"]
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SpecError(f"dtype {x.dtype} cannot be encoded; these can: {', '.join(DTYPES)}")
    if x.layout is not torch.strided:
        raise SpecError(f"a tensor of layout {x.layout} cannot be encoded: make it dense, or encode its parts")
    if x.device.type != "cpu":
        raise EngineError(f"no engine for tensors on {x.device}; move it to the CPU first")
    x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    x = x.contiguous()
    if x.ndim > 8:
        raise SpecError(f"rank {x.ndim} is above 8")
    return TensorView(name, tuple(x.shape), _pointer(x.data_ptr()), x.numel() * x.element_size(), x)


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


def _from_dlpack(x: Any) -> TensorView:
    if x.__dlpack_device__()[0] not in (1, 3):  # kDLCPU, kDLCUDAHost
        raise EngineError(f"no engine for tensors on device {x.__dlpack_device__()}; move it to the CPU first")
    try:
        return _from_numpy(np.from_dlpack(x))
    except (BufferError, RuntimeError):
        pass  # a dtype that numpy lacks
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
    # as bits, from the lowest to the highest address that the strides reach
    reach = 1 + sum((s - 1) * abs(d) for s, d in zip(shape, strides, strict=True)) if strides and n else n
    address = (t.data or 0) + t.byte_offset
    memory: Any = (ctypes.c_uint8 * (reach * itemsize)).from_address(address) if n else b""
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
    if dtype not in DTYPES:
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


def empty(dtype: str, shape: tuple[int, ...], like: Any = None) -> tuple[Any, TensorView]:
    """Make a tensor to decode into: of like's kind, or a numpy array."""
    if is_torch(like):
        torch: Any = sys.modules["torch"]
        t = torch.empty(shape, dtype=getattr(torch, dtype))
        return t, _from_torch(t)
    if dtype in _NUMPY:
        array = np.empty(shape, _NUMPY[dtype])
        return array, TensorView(dtype, shape, ffi.from_buffer(array), array.nbytes, array)
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
