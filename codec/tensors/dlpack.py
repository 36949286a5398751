"""Import of memory that other libraries describe by DLPack or by ``__cuda_array_interface__``.

A description can come from any object, so this module checks its numbers before memory is read. It cannot check that
the memory exists: a producer that reports a wrong address crashes the process.
"""

import ctypes
import math
from typing import Any, NamedTuple

from codec.errors import ArgumentError

_MAX_NBYTES = (1 << 63) - 1  # maximum bytes of a tensor, and of the memory that its strides span
_MAX_ADDRESS = (1 << 63) - 1  # highest address that a process can have
_MAX_RANK = 64  # numpy's maximum number of dimensions; codec.tensors.view checks the maximum for encoding, 8


class Exported(NamedTuple):
    """Tensor of another library, in host memory or on a device."""

    dtype: str  # name of the dtype, or a description if this library has no such dtype
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in bytes; None: C-contiguous
    address: int  # address of the first item
    device: str
    stream: int | None  # CUDA stream on which the values are ready; None: they are ready already
    readonly: bool
    owner: object  # keeps the memory alive

    @property
    def nbytes(self) -> int:
        """Size of all items in bytes."""
        return self.itemsize * math.prod(self.shape)

    @property
    def reach(self) -> int:
        """Number of bytes from the first byte of the lowest item to the last byte of the highest one."""
        steps = zip(self.shape, self.strides or (), strict=False)
        return self.itemsize + sum((n - 1) * abs(stride) for n, stride in steps) if self.nbytes else 0


class DLTensor(ctypes.Structure):
    """DLPack's struct DLTensor, the first field of an unversioned capsule's struct."""

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


class _VersionedHead(ctypes.Structure):
    """Fields of DLPack's struct DLManagedTensorVersioned that precede its field ``dl_tensor``."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


_VERSION = (1, 0)
_READ_ONLY = 1  # the bit DLPACK_FLAG_BITMASK_READ_ONLY in the field `flags` of a versioned capsule
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype = ctypes.c_char_p
_get_name.argtypes = (ctypes.py_object,)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_FLOAT8 = {10: "e4m3fn", 11: "e4m3fnuz", 12: "e5m2", 13: "e5m2fnuz", 14: "e8m0fnu"}
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 11: "cpu", 13: "cuda",
            14: "oneapi", 15: "webgpu", 16: "hexagon", 17: "maia"}  # fmt: skip
_LEGACY_STREAM = 1  # DLPack's number for CUDA's legacy default stream


def device_name(device: Any) -> str:
    """Convert the result of ``__dlpack_device__`` to torch's name of the device; "cpu" for all host memory.

    Raises
    ------
    ArgumentError
        `device` is not a pair of integers.
    """
    try:
        number, index = (int(n) for n in device)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"__dlpack_device__() must return two integers, not {type(device).__name__}") from None
    kind = _DEVICES.get(number, f"device type {number}")
    return kind if kind == "cpu" else f"{kind}:{index}"


def _dtype_name(code: int, bits: int, lanes: int) -> str | None:
    """Return the name of a DLPack type; None if the library has no such dtype."""
    if lanes == 1 and code in _FLOAT8:
        return f"float8_{_FLOAT8[code]}"
    if lanes == 1 and code in _CODES:
        return "bool" if code == 6 else f"{_CODES[code]}{bits}"
    return None


def from_dlpack(x: Any) -> Exported:
    """Export x by DLPack, and return the checked description of its memory.

    Raises
    ------
    ArgumentError
        x does not export a DLPack capsule, or the capsule's numbers are impossible.
    """
    capsule = _capsule_of(x)
    t, readonly = _tensor_in(capsule)
    if not 0 <= t.ndim <= _MAX_RANK or (t.ndim and not t.shape):
        raise ArgumentError(f"a DLPack tensor of {t.ndim} dimensions, or without a shape, cannot be encoded")
    itemsize, rest = divmod(t.bits * t.lanes, 8)
    name = _dtype_name(t.code, t.bits, t.lanes) or (
        f"{getattr(x, 'dtype', 'unknown')} (DLPack type of code {t.code}, {t.bits} bits, {t.lanes} lanes)"
    )
    if rest or not itemsize:
        raise ArgumentError(
            f"{name} cannot be encoded, since its values are not whole bytes: convert the tensor to another dtype"
        )
    shape = tuple(int(t.shape[i]) for i in range(t.ndim))
    strides = tuple(int(t.strides[i]) * itemsize for i in range(t.ndim)) if t.strides else None
    device = device_name((t.device_type, t.device_id))
    stream = _LEGACY_STREAM if device.startswith("cuda") else None
    address = (t.data or 0) + t.byte_offset
    return _checked(Exported(name, itemsize, shape, strides, address, device, stream, readonly, capsule))


def _capsule_of(x: Any) -> Any:
    """Return the DLPack capsule of x, in the newest version that both x and this module support.

    For memory on a GPU, the argument ``stream`` asks the producer to synchronize with the legacy default stream, so
    that work on that stream sees the values. Without the argument, some producers do not wait for their own stream.
    """
    stream = {"stream": _LEGACY_STREAM} if device_of(x).startswith("cuda") else {}
    try:
        try:
            return x.__dlpack__(**stream, max_version=_VERSION)
        except TypeError:  # x implements DLPack before version 1.0
            return x.__dlpack__(**stream)
    except Exception as e:  # such as JAX's own error for values of less than a byte
        kind, why = f"{type(x).__name__} of dtype {getattr(x, 'dtype', 'unknown')}", str(e).partition("\n")[0]
        raise ArgumentError(
            f"{kind} does not export its memory by DLPack: {why}; convert it to a numpy array, or to another dtype"
        ) from None


def _tensor_in(capsule: Any) -> tuple[DLTensor, bool]:
    """Return the DLTensor of a capsule, and True if its memory is read-only."""
    name = _get_name(capsule) if type(capsule).__name__ == "PyCapsule" else None
    if name == b"dltensor":
        return DLTensor.from_address(_get_pointer(capsule, name)), False
    if name == b"dltensor_versioned":
        head = _VersionedHead.from_address(address := _get_pointer(capsule, name))
        if head.major == _VERSION[0]:
            return DLTensor.from_address(address + ctypes.sizeof(head)), bool(head.flags & _READ_ONLY)
    raise ArgumentError(f"__dlpack__() must return an unused DLPack capsule of version 0 or 1, not {capsule!r}")


def from_cuda_array_interface(x: Any) -> Exported:
    """Return the checked description of the memory in the ``__cuda_array_interface__`` of x.

    Raises
    ------
    ArgumentError
        The interface lacks an entry, has an entry of another type, or its numbers are impossible.
    """
    said: Any = x.__cuda_array_interface__
    try:
        typestr: str = said["typestr"]
        name, itemsize = _typestr_name(typestr)
        strides = said.get("strides")
        shape = _whole_numbers(said["shape"])
        address, readonly = said["data"]
        address, stream = int(address or 0), said.get("stream")
        strides = None if strides is None else _whole_numbers(strides)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as e:
        raise ArgumentError(f"__cuda_array_interface__ of {type(x).__name__} cannot be read: {e!r}") from None
    # the interface does not contain the index of the device, so the name is "cuda" without an index
    return _checked(Exported(name, itemsize, shape, strides, address, "cuda", stream, bool(readonly), x))


def _whole_numbers(numbers: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in numbers)


def _typestr_name(typestr: str) -> tuple[str, int]:
    """Return name and itemsize of the dtype of a typestr such as "<f4". The name of an unknown dtype is the typestr."""
    order, kind, itemsize = typestr[0], typestr[1], int(typestr[2:])
    if order == ">" and itemsize > 1:
        raise ArgumentError(
            f"values of type {typestr} cannot be encoded, since they are big-endian: convert them to native byte order"
        )
    if kind == "b":
        return "bool", itemsize
    name = {"i": "int", "u": "uint", "f": "float"}.get(kind)
    return f"{name}{8 * itemsize}" if name else typestr, itemsize


def _checked(e: Exported) -> Exported:
    """Return `e`; raise ArgumentError if its shape, strides or address are impossible."""
    if e.itemsize < 1 or any(n < 0 for n in e.shape):
        raise ArgumentError(f"a tensor cannot have the shape {e.shape} with {e.itemsize} bytes for each value")
    if e.strides is not None and len(e.strides) != len(e.shape):
        raise ArgumentError(f"a tensor of shape {e.shape} cannot have the strides {e.strides}")
    if not (nbytes := e.nbytes):  # no memory is read: strides and address need no check
        return e
    if not e.address:
        raise ArgumentError(f"a tensor of shape {e.shape} has a null pointer as the address of its values")
    reach = nbytes if e.strides is None else e.reach
    if nbytes > _MAX_NBYTES or reach > _MAX_NBYTES or e.address + reach > _MAX_ADDRESS:
        raise ArgumentError(f"a tensor of shape {e.shape} and strides {e.strides} is larger than memory can be")
    return e


def device_of(x: Any) -> str:
    """Return the device that an object reports by DLPack or CUDA array interface; "cpu" if it reports none."""
    if isinstance(x, type):  # a class has the attribute __dlpack_device__ of its instances, but no values
        return "cpu"
    if hasattr(x, "__dlpack_device__"):
        return device_name(x.__dlpack_device__())
    return "cuda" if hasattr(x, "__cuda_array_interface__") else "cpu"


def is_contiguous(e: Exported) -> bool:
    """Return True if the tensor's items are C-contiguous."""
    if e.strides is None or 0 in e.shape:
        return True
    expected = e.itemsize
    for n, stride in zip(reversed(e.shape), reversed(e.strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True
