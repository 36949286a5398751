"""Views that describe a tensor of any library by dtype, shape and address, and allocation of new tensors.

This module imports no tensor library except numpy. It finds torch and CuPy in sys.modules if the caller has imported
them. A view may describe memory on a device; engines check that they can read the device.

One file: for each tensor library, views of inputs and of outputs follow the same rules.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np

from codec._c.library import DTYPES, ITEMSIZE, ffi
from codec.arguments import shown
from codec.errors import ArgumentError, EngineError
from codec.tensors.dlpack import Exported, device_of, from_cuda_array_interface, from_dlpack, is_contiguous

Array = np.ndarray[Any, Any]

_UINT = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_NUMPY = {name: np.dtype(name) for name in DTYPES if name == "bool" or hasattr(np, name)}  # numpy 1 has no np.bool
_by_dtype: dict[Any, str] = {dtype: name for name, dtype in _NUMPY.items()}
_CAN = f"these can: {', '.join(DTYPES)}"
_MAX_RANK = 8
_UINTPTR = ffi.typeof("uintptr_t")
_BYTES = ffi.typeof("uint8_t *")
_CHARS = ffi.typeof("char[]")
_from_buffer, _cast = ffi.from_buffer, ffi.cast
_new: Any = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class _Memory:
    """Memory at an address, in numpy's array interface, together with the object that keeps this memory allocated."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__, self.owner = interface, owner


def array_at(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object, strides: tuple[int, ...] | None = None
) -> Array:
    """Return memory at an address as a writable array. The array, and any view of it, keeps `owner` alive.

    Every array over an address is made here, so that none outlives its memory. `strides` are in bytes.
    """
    data = {"version": 3, "data": (address, False), "shape": shape, "typestr": dtype.str, "strides": strides}
    return np.asarray(_Memory(data, owner)) if 0 not in shape else np.empty(shape, dtype)


class TensorView(NamedTuple):
    """View of a C-contiguous tensor, in host memory or on a device."""

    dtype: str
    shape: tuple[int, ...]
    data: Any  # C pointer to memory of the tensor's device
    nbytes: int
    owner: object  # keeps the memory alive
    device: str = "cpu"
    stream: int | None = None  # CUDA stream on which the values are ready; None: they are ready already

    @property
    def address(self) -> int:
        """Address of the tensor's first value, in host or device memory."""
        return int(ffi.cast(_UINTPTR, self.data))

    def array(self, dtype: Any = np.uint8) -> Array:
        """Return the memory, which must be on the host, as a flat writable array that keeps the owner alive."""
        kind = np.dtype(dtype)
        return array_at(self.address, (self.nbytes // kind.itemsize,), kind, self.owner)

    def first(self, nbytes: int) -> "TensorView":
        """Return a view of at most the first `nbytes` bytes of this view, which must be a view of bytes."""
        n = min(self.nbytes, nbytes)
        return self._replace(shape=(n,), nbytes=n)


def _pointer(address: int) -> Any:
    return ffi.cast(_BYTES, address)


def _check_rank(rank: int) -> None:
    if rank > _MAX_RANK:
        raise ArgumentError(f"the tensor has {rank} dimensions; the maximum is {_MAX_RANK}: reshape it")


def dtype_name(dtype: Any) -> str:
    """Return this library's name of a dtype.

    Parameters
    ----------
    dtype : str, type or dtype
        A name or type that numpy accepts, or a dtype of numpy, ml_dtypes or torch.

    Raises
    ------
    ArgumentError
        `dtype` is not a dtype, or values of it cannot be encoded.
    """
    if (name := _find_name(dtype)) is None:
        given = dtype if isinstance(dtype, str) else shown(dtype)
        raise ArgumentError(f"dtype {given} cannot be encoded; {_CAN}")
    return name


def _find_name(dtype: Any) -> str | None:
    """Return this library's name of a dtype, or None if values of the dtype cannot be encoded."""
    try:
        if (name := _by_dtype.get(dtype)) is not None:
            return name
    except TypeError:  # `dtype` is not hashable
        pass
    if dtype is None:
        return None
    try:
        name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
        if name not in DTYPES:
            name = np.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError):
        return None
    return name if name in DTYPES else None


def _name_for(own: Any, itemsize: int, wanted: str | None) -> str:
    """Return the name of the dtype as which a tensor's items are read.

    Parameters
    ----------
    own : dtype
        The tensor's own dtype, which is used if `wanted` is None.
    itemsize : int
        Bytes per item; must equal the itemsize of `wanted`.
    wanted : str or None
        Dtype that the user requested.

    Raises
    ------
    ArgumentError
        The itemsizes differ, or `wanted` is None and `own` cannot be encoded.
    """
    if wanted is None:
        if (name := _find_name(own)) is None:
            raise ArgumentError(
                f"dtype {own} cannot be encoded; {_CAN}; codec.view(x, dtype) reads the bits of x as one of these"
            )
        return name
    if itemsize != ITEMSIZE[wanted]:
        raise ArgumentError(
            f"{own} has {itemsize} bytes for each value, and cannot be read as {wanted}, which has {ITEMSIZE[wanted]}"
        )
    return wanted


def _refuse_masked(x: Any) -> None:
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(x, ma.MaskedArray) and ma.is_masked(x):
        raise ArgumentError(
            "some values of this array are masked, which frames cannot represent: encode x.filled() instead"
        )


def _from_numpy(x: Array, wanted: str | None = None) -> TensorView:
    name = _by_dtype.get(x.dtype)
    if name is None or wanted is not None:
        if not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
        if x.dtype.hasobject:
            raise ArgumentError(
                f"an array of Python objects (dtype {x.dtype}) cannot be encoded: convert it to numbers"
            )
        name = _name_for(x.dtype, x.dtype.itemsize, wanted)
        if wanted is None:
            _by_dtype[x.dtype] = name
    shape = x.shape
    if len(shape) > _MAX_RANK:
        _check_rank(len(shape))
    try:
        data = _from_buffer(x)
    except (ValueError, BufferError, TypeError):  # not contiguous, or a dtype without a buffer format
        if not x.flags.c_contiguous:
            x = x.copy(order="C")
        data = _pointer(x.__array_interface__["data"][0])
    return _new(TensorView, (name, shape, data, x.nbytes, x, "cpu", None))  # a third of the time of TensorView(...)


def is_torch(x: object) -> TypeGuard[Any]:
    """Return True if x is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def _from_torch(x: Any, wanted: str | None = None) -> TensorView:
    torch: Any = sys.modules["torch"]
    name = _by_dtype.get(x.dtype)
    if name is None or wanted is not None:
        name = _name_for(x.dtype, x.dtype.itemsize, wanted)
        if wanted is None:
            _by_dtype[x.dtype] = name
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested tensor" if x.is_nested else f"tensor of layout {x.layout}"
        raise ArgumentError(f"a {kind} cannot be encoded: convert it to a dense tensor, or encode its parts")
    check_storage(x)
    x = x.data if type(x) is torch.Tensor else x.detach()  # .data takes a third of the time
    if x.is_neg():
        x = x.resolve_neg()
    if x.is_conj():
        x = x.resolve_conj()
    x = x.contiguous()
    shape = tuple(x.shape)
    if len(shape) > _MAX_RANK:
        _check_rank(len(shape))
    nbytes, address = x.nbytes, x.data_ptr()
    if nbytes and not address and not x.is_meta:  # a subclass that wraps other tensors, such as DTensor
        raise ArgumentError(
            f"a {type(x).__name__} has no memory of its own: encode the tensors that hold its values, such as "
            ".to_local() of a DTensor"
        )
    if x.is_cpu:
        return _new(TensorView, (name, shape, _cast(_BYTES, address), nbytes, x, "cpu", None))
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
    return _new(TensorView, (name, shape, _pointer(address), nbytes, x, str(x.device), stream))


def check_storage(x: Any) -> None:
    """Raise ArgumentError if a tensor's shape and strides exceed its storage, which torch does not check."""
    try:
        storage = x.untyped_storage()
        there = storage.nbytes() if storage.device == x.device else -1
    except (RuntimeError, NotImplementedError):
        there = -1
    if there < 0:
        raise ArgumentError(
            "this tensor has no memory of its own: inside transforms of torch.func, such as vmap and grad, and in "
            "traced code, tensors cannot be encoded or decoded into"
        )
    if x.is_contiguous():
        end = x.storage_offset() * x.itemsize + x.nbytes
    else:
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        end = (x.storage_offset() + last + 1) * x.itemsize
    if end > there and x.numel():
        raise ArgumentError(f"a tensor of shape {tuple(x.shape)} needs {end} bytes, but its storage has {there}")


def is_cupy(x: object) -> TypeGuard[Any]:
    """Return True if x is a CuPy array, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, getattr(cupy, "ndarray", ()))


def _from_cupy(x: Any, wanted: str | None = None) -> TensorView:
    """Return a view of a CuPy array for use on CuPy's current stream. DLPack would synchronize the default stream."""
    cupy: Any = sys.modules["cupy"]
    name = _name_for(x.dtype, x.dtype.itemsize, wanted)
    _check_rank(x.ndim)
    with x.device:
        x = cupy.ascontiguousarray(x) if x.ndim else x
        stream = cupy.cuda.get_current_stream().ptr
    return TensorView(name, x.shape, _pointer(x.data.ptr), x.nbytes, x, f"cuda:{x.device.id}", stream)


def mark_written(out: Any) -> None:
    """Increment autograd's version counter of a tensor that was overwritten, if it is a torch tensor."""
    if type(out) is not np.ndarray and is_torch(out):
        sys.modules["torch"].autograd.graph.increment_version(out)


def _from_exported(e: Exported, wanted: str | None = None) -> TensorView:
    name = _name_for(e.dtype, e.itemsize, wanted)
    if e.itemsize != ITEMSIZE[name]:
        raise ArgumentError(f"{name} has {ITEMSIZE[name]} bytes for each value, but this tensor reports {e.itemsize}")
    _check_rank(len(e.shape))
    if is_contiguous(e):
        return TensorView(name, e.shape, _pointer(e.address), e.nbytes, e.owner, e.device, e.stream)
    if e.device != "cpu":
        raise ArgumentError(
            f"a tensor on {e.device} must be contiguous, got strides {e.strides}: copy it to contiguous memory first"
        )
    # view the memory as a strided numpy array of unsigned integers; _from_numpy then copies it to be contiguous
    bits = array_at(e.address, e.shape, _UINT[e.itemsize], e.owner, e.strides)
    return _from_numpy(bits)._replace(dtype=name)


def view(x: Any, dtype: Any = None) -> TensorView:
    """Return a view of x as a C-contiguous tensor; x is copied only if it is not contiguous.

    Parameters
    ----------
    x : array, tensor or buffer
        An object with a buffer, ``__array_interface__``, DLPack or ``__cuda_array_interface__``.
    dtype : str, type or dtype, optional
        Read the bits of x as values of this dtype, which must have the itemsize of x's own dtype: complex64 can be read
        as uint64, for example.

    Raises
    ------
    ArgumentError
        x is not a tensor, has a dtype or rank that cannot be encoded, or has another itemsize than `dtype`.
    """
    wanted = dtype if dtype is None or (type(dtype) is str and dtype in DTYPES) else dtype_name(dtype)
    if type(x) is np.ndarray:
        return _from_numpy(x, wanted)  # pyright: ignore[reportUnknownArgumentType] - a cast would be a call
    if is_torch(x):
        return _from_torch(x, wanted)
    if is_cupy(x):
        return _from_cupy(x, wanted)
    if isinstance(x, type):
        raise ArgumentError(f"not a tensor: {kind_of(x)}")
    if isinstance(x, np.ndarray | np.generic) or hasattr(x, "__array_interface__"):
        _refuse_masked(x)
        return _from_numpy(_as_array(x), wanted)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_exported(from_dlpack(x), wanted)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_exported(from_cuda_array_interface(x), wanted)
    try:
        memory = memoryview(x)
    except TypeError:
        raise ArgumentError(f"not a tensor: {kind_of(x)} has no buffer, array interface or DLPack{_hint(x)}") from None
    return _from_numpy(_as_array(memory), wanted)


def _as_array(x: Any) -> Array:
    """Return a buffer or an object with ``__array_interface__`` as a numpy array that shares its memory."""
    try:
        return np.asarray(x)
    except (TypeError, ValueError) as e:
        raise ArgumentError(f"{kind_of(x)} cannot be read as an array: {e}") from None


def _hint(x: object) -> str:
    """Return advice for a mapping or sequence of tensors, for a message; "" for any other object."""
    if isinstance(x, Mapping):
        return "; encode_many() encodes each tensor of a mapping"
    if isinstance(x, list | tuple):
        return "; encode_many() encodes each tensor of a sequence, numpy.array() makes an array of numbers"
    jax: Any = sys.modules.get("jax.core")
    if jax is not None and isinstance(x, getattr(jax, "Tracer", ())):
        return ": inside jit, grad and vmap of JAX, arrays have no values; call codec outside, or by jax.pure_callback"
    return ""


def view_bytes(frame: Any) -> TensorView:
    """Return a view of a frame, which may have any type of tensor or buffer, as uint8."""
    if type(frame) is memoryview and frame.nbytes and frame.c_contiguous:
        # use an array instead of the memoryview: CPython crashes if the garbage collector clears a memoryview whose
        # buffer is in use, for example after an error whose traceback refers to itself
        frame = np.frombuffer(frame, np.uint8)
    elif type(frame) is not bytes:
        v = view(frame)
        return v._replace(dtype="uint8", shape=(v.nbytes,))
    data = _from_buffer(frame)
    n = len(frame)
    return _new(TensorView, ("uint8", (n,), data, n, frame, "cpu", None))


def view_base(base: Any, dtype: str) -> TensorView:
    """Return a view of the base of a tensor of `dtype`; unsigned integers of that itemsize are read as its bits."""
    v = view(base)
    takes_bits = v.dtype in ("uint8", "uint16", "uint32", "uint64") and ITEMSIZE[v.dtype] == ITEMSIZE[dtype]
    return view(base, dtype) if takes_bits and v.dtype != dtype else v


def view_output(out: Any, dtype: str | None = None, name: str = "out=") -> TensorView:
    """Return a view of an argument that will be written in place.

    Parameters
    ----------
    out : array or tensor
        Contiguous and writable.
    dtype : str, optional
        Dtype of the values to be written. If `out` has unsigned integers, or a dtype that cannot be encoded such as
        complex64, of the same itemsize, the values' bits are written to it.
    name : str
        Name of the argument, for messages.

    Raises
    ------
    ArgumentError
        `out` is not an array or tensor, is read-only or not contiguous, or has a dtype that cannot be encoded.
    """
    if type(out) is np.ndarray:
        v = _from_own(out, name, dtype)  # pyright: ignore[reportUnknownArgumentType] - a cast would be a call
    elif is_torch(out):
        v = _from_torch(out, _wanted(out.dtype, dtype))
        if not out.is_contiguous() or out.is_neg() or out.is_conj():
            raise ArgumentError(f"{name} must be contiguous")
    elif is_cupy(out):
        if not out.flags.c_contiguous:
            raise ArgumentError(f"{name} must be C-contiguous")
        v = _from_cupy(out, _wanted(out.dtype, dtype))
    elif isinstance(out, np.ndarray):
        _refuse_masked(out)
        v = _from_own(cast(Array, out), name, dtype)
    elif (device := device_of(out)) != "cpu":
        e = from_cuda_array_interface(out) if hasattr(out, "__cuda_array_interface__") else from_dlpack(out)
        if e.readonly:
            raise ArgumentError(f"{name} is read-only")
        v = _from_exported(e, _wanted(e.dtype, dtype))._replace(device=device)
    else:
        try:
            memory = memoryview(out)
        except (TypeError, BufferError):  # JAX raises BufferError for bfloat16 arrays
            raise ArgumentError(f"{name} must be a writable array or tensor, got {kind_of(out)}") from None
        v = _from_own(_as_array(memory), name, dtype)
    return v if dtype is None else with_bits(v, dtype)


def with_bits(v: TensorView, dtype: str) -> TensorView:
    """Return a view of an output with dtype `dtype` if it has unsigned integers of that size; else `v` unchanged."""
    takes_bits = v.dtype != dtype and v.dtype == f"uint{8 * ITEMSIZE[dtype]}"
    return v._replace(dtype=dtype) if takes_bits else v


def _wanted(own: Any, dtype: str | None) -> str | None:
    """Return `dtype` if the output's dtype `own` cannot be encoded, so that values are written as bits; else None."""
    return dtype if dtype is not None and _find_name(own) is None else None


def kind_of(x: object) -> str:
    """Return the type of an argument as text, for a message about a wrong type."""
    return f"the class {x.__name__}" if isinstance(x, type) else type(x).__name__


def _from_own(array: Array, argument: str, dtype: str | None) -> TensorView:
    """Return a view of an array's own memory, never of a copy; `argument` and `dtype` as in :func:`view_output`."""
    name = _by_dtype.get(array.dtype)
    if name is not None and array.ndim <= _MAX_RANK:
        try:
            data = _from_buffer(_CHARS, array, True)  # fails unless the array is contiguous and writable
        except (ValueError, BufferError, TypeError):
            pass
        else:
            return _new(TensorView, (name, array.shape, data, array.nbytes, array, "cpu", None))
    flags = array.flags
    if not flags.c_contiguous:
        raise ArgumentError(f"{argument} must be C-contiguous")
    if not flags.writeable:
        raise ArgumentError(f"{argument} is read-only: pass a writable array")
    if not array.dtype.isnative:
        raise ArgumentError(f"{argument} must be in native byte order, got {array.dtype}")
    return _from_numpy(array, _wanted(array.dtype, dtype))


def on_host(name: str, v: TensorView, who: str = "this function") -> TensorView:
    """Return a view that is in host memory; raise EngineError for one on a device.

    Parameters
    ----------
    name : str
        Name of the argument, for messages.
    v : TensorView
        View of the argument.
    who : str
        Component that reads the argument, such as "the native engine", for messages.

    Raises
    ------
    EngineError
        The view is on a device.
    """
    if v.device != "cpu":
        raise EngineError(refusal(name, v.device, who))
    return v


def fetch(name: str, v: TensorView, nbytes: int | None = None) -> TensorView:
    """Return `v` if it is in host memory; otherwise copy all bytes, or the first `nbytes`, and return a view of them.

    Raises
    ------
    EngineError
        The view is on a device, and its owner is neither a torch tensor nor a CuPy array.
    """
    if v.device == "cpu":
        return v
    x: Any = v.owner
    if v.device == "meta" or (not is_torch(x) and not hasattr(x, "get")):
        return on_host(name, v)
    x = x.reshape(-1)[: -(-(v.nbytes if nbytes is None else nbytes) // ITEMSIZE[v.dtype])]
    # copy bytes, because numpy has no bfloat16
    array = x.cpu().view(sys.modules["torch"].uint8).numpy() if is_torch(x) else np.asarray(x.get())
    return view_bytes(array)


def refusal(name: str, device: str, who: str) -> str:
    """Return the message for an argument on a device that `who` cannot read, with advice."""
    if device == "meta":
        return f"{name} is on meta, where tensors have no values"
    return f"{name} is on {device}, which {who} cannot read: copy it to host memory first, such as by .cpu()"


def device_like(like: Any) -> str:
    """Return the device of `like`; "cpu" for None."""
    if like is None or type(like) is np.ndarray:
        return "cpu"
    if not is_torch(like):
        return device_of(like)
    return "cpu" if like.is_cpu else str(like.device)


def _check_kind(like: Any) -> None:
    known = hasattr(like, "__array_interface__") or hasattr(like, "__dlpack__")
    try:
        if isinstance(like, type) or not known:
            memoryview(cast(Any, like))
    except TypeError:
        raise ArgumentError(f"like= must be an array or tensor, got {kind_of(like)}") from None


def empty(dtype: str, shape: tuple[int, ...], like: Any = None) -> tuple[Any, TensorView]:
    """Allocate a tensor in host memory to decode into, and return it with its view.

    The tensor has the type of `like`, an array or tensor. If `like` is None, it is a numpy array.
    """
    if like is None and (known := _NUMPY.get(dtype)) is not None:
        array = np.empty(shape, known)
        return array, _new(TensorView, (dtype, shape, _from_buffer(array), array.nbytes, array, "cpu", None))
    if is_torch(like):
        torch: Any = sys.modules["torch"]
        size = shape or ((),)  # separate numbers, which torch reads faster than a tuple
        # explicit device, because users can change torch's default device
        t = torch.empty(*size, dtype=getattr(torch, dtype), device="cpu")
        check_storage(t)
        return t, _new(TensorView, (dtype, shape, _cast(_BYTES, t.data_ptr()), t.nbytes, t, "cpu", None))
    if not isinstance(like, np.ndarray | None):
        _check_kind(like)
    if dtype in _NUMPY:
        return empty(dtype, shape)
    if isinstance(like, np.ndarray) and cast(Array, like).dtype in (_UINT[ITEMSIZE[dtype]], f"V{ITEMSIZE[dtype]}"):
        array = np.empty(shape, cast(Array, like).dtype)
    else:
        try:
            array = np.empty(shape, getattr(importlib.import_module("ml_dtypes"), dtype))
        except ImportError:
            raise EngineError(
                f"numpy has no {dtype}: install ml_dtypes, or pass like= a torch tensor, "
                f"or out= or like= an array of {_UINT[ITEMSIZE[dtype]]} for the bits"
            ) from None
    return array, _from_numpy(array, dtype)
