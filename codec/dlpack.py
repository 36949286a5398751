"""What an object says of its memory: by DLPack, or by ``__cuda_array_interface__``."""

import ctypes
from typing import Any, NamedTuple

from codec.errors import SpecError


class Exported(NamedTuple):
    """Memory of another library's, in host memory or on a device."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in bytes; None: C-contiguous
    address: int
    device: str
    stream: int | None  # on which it is ready; None: it is so already
    readonly: bool
    owner: object  # keeps it alive


class DLTensor(ctypes.Structure):
    """What a DLPack capsule begins with."""

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


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_FLOAT8 = {10: "e4m3fn", 11: "e4m3fnuz", 12: "e5m2", 13: "e5m2fnuz", 14: "e8m0fnu"}
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 11: "cpu", 13: "cuda",
            14: "oneapi", 15: "webgpu", 16: "hexagon", 17: "maia"}  # fmt: skip
_LEGACY_STREAM = 1  # for which a producer makes a CUDA tensor ready if no other is asked for


def device_name(device: tuple[Any, Any]) -> str:
    """What ``__dlpack_device__`` gives, as torch would write it; "cpu" for all that the host can read."""
    kind = _DEVICES.get(int(device[0]), f"device type {int(device[0])}")
    return kind if kind == "cpu" else f"{kind}:{int(device[1])}"


def _dtype_name(code: int, bits: int) -> str | None:
    if code in _FLOAT8:
        return f"float8_{_FLOAT8[code]}"
    if code not in _CODES:
        return None
    return "bool" if code == 6 else f"{_CODES[code]}{bits}"


def from_dlpack(x: Any) -> Exported:
    """What a DLPack capsule of x says, unchecked."""
    capsule = x.__dlpack__()
    t = ctypes.cast(_get_pointer(capsule, b"dltensor"), ctypes.POINTER(DLTensor)).contents
    name, itemsize = _dtype_name(t.code, t.bits), t.bits // 8
    if name is None or t.lanes != 1:
        raise SpecError(f"DLPack type (code {t.code}, {t.bits} bits, {t.lanes} lanes) cannot be encoded")
    shape = tuple(int(t.shape[i]) for i in range(t.ndim))
    strides = tuple(int(t.strides[i]) * itemsize for i in range(t.ndim)) if t.strides else None
    device = device_name((t.device_type, t.device_id))
    stream = _LEGACY_STREAM if device.startswith("cuda") else None
    return Exported(name, itemsize, shape, strides, (t.data or 0) + t.byte_offset, device, stream, False, capsule)


def from_cuda_array_interface(x: Any) -> Exported:
    """What ``__cuda_array_interface__`` says, unchecked."""
    said: Any = x.__cuda_array_interface__
    kind: str = said["typestr"]
    name = {"i": "int", "u": "uint", "f": "float"}.get(kind[1])
    itemsize = int(kind[2:])
    if kind[1] == "b":
        name = "bool"
    elif name is None or kind[0] == ">":
        raise SpecError(f"values of type {kind} cannot be encoded")
    else:
        name += str(8 * itemsize)
    strides = said.get("strides")
    address, readonly = said["data"]
    return Exported(
        name,
        itemsize,
        tuple(int(n) for n in said["shape"]),
        None if strides is None else tuple(int(n) for n in strides),
        int(address or 0),
        "cuda",  # which of several it does not say
        said.get("stream"),
        bool(readonly),
        x,
    )


def device_of(x: Any) -> str:
    """Where an object says that its values are; "cpu" if it says nothing."""
    if isinstance(x, type):  # which has methods, but nobody to call them on
        return "cpu"
    if hasattr(x, "__dlpack_device__"):
        return device_name(x.__dlpack_device__())
    return "cuda" if hasattr(x, "__cuda_array_interface__") else "cpu"


def is_contiguous(e: Exported) -> bool:
    """Whether its values follow each other, the last dimension fastest."""
    if e.strides is None or 0 in e.shape:
        return True
    expected = e.itemsize
    for n, stride in zip(reversed(e.shape), reversed(e.strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True
