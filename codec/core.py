"""The C library: loaded once, its status turned into exceptions, its structs filled in."""

import os
from pathlib import Path
from typing import Any, get_args

from codec import _cffi, errors, specs  # pyright: ignore[reportAttributeAccessIssue] - written by the build
from codec.specs import Spec

ffi: Any = _cffi.ffi
# beside the generated module, which need not lie beside this file
_path = os.environ.get("CODEC_LIBRARY") or str(Path(_cffi.__file__).with_name("lib") / "libcodec.so")
# never unloaded: daemon threads may be in it when the interpreter ends
lib: Any = ffi.dlopen(_path, ffi.RTLD_NOW | ffi.RTLD_NODELETE)
if lib.codec_abi_version() != lib.CODEC_ABI_VERSION:
    raise ImportError(f"{_path} has ABI {lib.codec_abi_version()}, this package needs {lib.CODEC_ABI_VERSION}")

DTYPES: dict[str, int] = {
    name.removeprefix("CODEC_").lower(): number for number, name in ffi.typeof("codec_dtype").elements.items()
}
DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
ITEMSIZE: dict[str, int] = {name: lib.codec_dtype_nbytes(number) for name, number in DTYPES.items()}

_FRAME_ERRORS = {
    lib.CODEC_CHECKSUM: errors.ChecksumError,
    lib.CODEC_UNSUPPORTED: errors.UnsupportedError,
    lib.CODEC_LIMIT: errors.LimitError,
}


def check(status: int, fault: Any = None) -> None:
    """Raise what a status stands for."""
    if status == 0:
        return
    text = ffi.string(lib.codec_strerror(status)).decode()
    if status in (lib.CODEC_MISSING_STATE, lib.CODEC_OTHER_STATE):
        raise errors.StateError(text)
    if status == lib.CODEC_UNKNOWN_CODEBOOK:
        raise errors.StateError(f"{text}: id {fault.found:#018x}")
    if status < lib.CODEC_TRUNCATED:
        if status == lib.CODEC_SHAPE_MISMATCH and fault is not None:
            text += f" (frame has {fault.found}, destination {fault.expected})"
        raise errors.SpecError(text)
    if fault is None:
        raise _FRAME_ERRORS.get(status, errors.FrameError)(text, status)
    where = f"{text} (byte {fault.offset}: found {fault.found:#x}, expected {fault.expected:#x})"
    raise _FRAME_ERRORS.get(status, errors.FrameError)(where, status, fault.offset, fault.found, fault.expected)


def isas() -> tuple[str, ...]:
    """Instruction sets that this machine can use, slowest first."""
    return tuple(name for i, name in enumerate(_isa_names) if lib.codec_isa_usable(i))


def _names() -> tuple[str, ...]:
    names: list[str] = []
    while (p := lib.codec_isa_name(len(names))) != ffi.NULL:
        names.append(ffi.string(p).decode())
    return tuple(names)


_isa_names = _names()
_isa: int | None = None  # None: CODEC_ISA has not been read yet


class _Forced:
    """Restores the former choice when used as a context manager."""

    def __init__(self, former: int) -> None:
        self._former = former

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _isa
        _isa = self._former


def use_isa(name: str | None) -> _Forced:
    """Force an instruction set in this process; the bytes do not change.

    Parameters
    ----------
    name : str or None
        One of :func:`codec.isas`, or None for the best one. The environment variable ``CODEC_ISA`` does the same.

    Returns
    -------
    context manager
        Leaving it restores the former choice; it need not be entered.

    Raises
    ------
    EngineError
        This library or this machine does not have it.
    """
    global _isa
    if name and name not in isas():
        raise errors.EngineError(f"instruction set {name!r} is not usable here, these are: {', '.join(isas())}")
    former = current_isa()
    _isa = _isa_names.index(name) + 1 if name else 0
    return _Forced(former)


def current_isa() -> int:
    """The number for ``codec_context.isa``."""
    global _isa
    if _isa is None:
        _isa = 0
        try:
            use_isa(os.environ.get("CODEC_ISA"))
        except errors.EngineError:
            _isa = None
            raise
    return _isa


SMALL_TENSOR = 1 << 16  # bytes: frames of such are built in a call's own buffer and copied
SMALL_FRAME = (1 << 16) + 256  # the bound of a tensor of 64 KiB
SMALL_SCRATCH = 1 << 20

_new_uninitialized = ffi.new_allocator(should_clear_after_alloc=False)


def new_bytes(n: int) -> Any:
    """Uninitialized bytes."""
    return _new_uninitialized("uint8_t[]", n)


def new_tensor(dtype: int, shape: tuple[int, ...], data: Any = ffi.NULL, nbytes: int = 0) -> Any:
    """A codec_tensor."""
    t = ffi.new("codec_tensor *")
    t.struct_nbytes = ffi.sizeof("codec_tensor")
    t.dtype, t.rank, t.data, t.nbytes = dtype, len(shape), data, nbytes
    t.shape[0 : len(shape)] = shape
    return t


_INFO, _INFO_NBYTES = ffi.typeof("codec_info *"), ffi.sizeof("codec_info")


def new_info() -> Any:
    """A codec_info."""
    info = ffi.new(_INFO)
    info.struct_nbytes = _INFO_NBYTES
    return info


class Call:
    """Structs and buffers of one call of a public function, from :func:`take` to :func:`give`.

    Small tensors would spend most of their time on making them. Nobody else has them meanwhile: code of the user's that
    runs in the midst of a call (a mapping's, a finalizer, a signal handler) and makes a call of its own takes others.
    """

    __slots__ = ("_blank", "_scratch", "_shape", "context", "fault", "frame", "info", "keep", "size", "tensor")

    def __init__(self) -> None:
        self.fault = ffi.new("codec_fault *")
        blank = ffi.new("codec_context *")
        blank.struct_nbytes = ffi.sizeof("codec_context")
        blank.fault = self.fault
        blank.weight = 1
        self._blank = blank[0]
        self.context = ffi.new("codec_context *")
        self.tensor = new_tensor(0, ())
        self._shape = self.tensor.shape
        self.size = ffi.new("size_t *")
        self.info = new_info()
        self.frame = new_bytes(SMALL_FRAME)
        self._scratch: Any = None
        self.keep: Any = None  # what the structs point to

    def reset(self) -> None:
        """Make the context one that asks for nothing."""
        context = self.context
        context[0] = self._blank
        context.isa = current_isa() if _isa is None else _isa

    def fill_tensor(self, dtype: int, shape: tuple[int, ...], data: Any, nbytes: int) -> Any:
        """The codec_tensor."""
        t = self.tensor
        rank = len(shape)
        t.dtype = dtype
        t.rank = rank
        self._shape[0:rank] = shape
        t.data = data
        t.nbytes = nbytes
        return t

    def small_scratch(self) -> Any:
        """SMALL_SCRATCH bytes, enough for any tensor of 64 KiB."""
        if self._scratch is None:
            self._scratch = new_bytes(SMALL_SCRATCH)
        return self._scratch

    def scratch(self, nbytes: int) -> Any:
        """At least nbytes."""
        return self.small_scratch() if nbytes <= SMALL_SCRATCH else new_bytes(nbytes)


_KEPT = 32
_free: list[Call] = []  # of any thread: pop and append are atomic


def take() -> Call:
    """Structs for one call, with a context that asks for nothing.

    They go back by :func:`give` once the call has succeeded. After an exception they are simply dropped.
    """
    try:
        call = _free.pop()
    except IndexError:
        call = Call()
    call.reset()
    return call


def give(call: Call) -> None:
    """The call is over."""
    call.keep = None
    if len(_free) < _KEPT:
        _free.append(call)


_spec_structs: dict[Spec, Any] = {}
_last: tuple[Any, Any] = (None, None)  # a spec, which cannot change, and its struct: most calls name the one before


def spec_struct(spec: Spec) -> Any:
    """The C struct of a spec; they are few and kept."""
    global _last
    known, struct = _last
    if known is spec:
        return struct
    if not isinstance(spec, Spec):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.SpecError(f"not a spec: {spec!r}")
    struct = _spec_structs.get(spec)
    if struct is None:
        fields = _fields_of(spec)
        struct = ffi.new("codec_spec *")
        struct.struct_nbytes = ffi.sizeof("codec_spec")
        for name, value in fields.items():
            setattr(struct, name, value)
        if len(_spec_structs) > 1000:  # a program that makes seeds or scales as it goes
            _spec_structs.clear()
        _spec_structs[spec] = struct
    _last = spec, struct
    return struct


def _index(choices: Any, value: object) -> int:
    return get_args(choices).index(value)


def _fields_of(spec: Spec) -> dict[str, Any]:
    """Fields of codec_spec that are not zero."""
    match spec:
        case specs.Lossless(cap, model):
            return {"codec": lib.CODEC_LOSSLESS, "cap": cap, "model": _index(specs.Model, model)}
        case specs.Sign(scale, block):
            row = lib.CODEC_ROW_LAST if block == "row" else block or 0
            return {"codec": lib.CODEC_SIGN, "variant": _index(specs.SignScale, scale), "row": row}
        case specs.Ternary(packing, scale, clip, seed):
            variant = _index(specs.Packing, packing)
            return {
                "codec": lib.CODEC_TERNARY,
                "variant": variant,
                "scale": scale or 0,
                "clip": clip or 0,
                "seed": seed,
            }
        case specs.Float8(format, row, rounding, nonfinite, scale, entropy, seed):
            return {
                "codec": lib.CODEC_FLOAT8,
                "variant": _index(specs.Format8, format),
                "row": row or 0,
                "options": (rounding == "stochastic") * lib.CODEC_OPTION_STOCHASTIC
                | (nonfinite == "propagate") * lib.CODEC_OPTION_PROPAGATE
                | entropy * lib.CODEC_OPTION_ENTROPY,
                "scale": scale or 0,
                "seed": seed,
            }
        case specs.Float4(format, rounding, seed):
            options = (rounding == "stochastic") * lib.CODEC_OPTION_STOCHASTIC
            variant = _index(specs.Format4, format)
            return {"codec": lib.CODEC_FLOAT4, "variant": variant, "options": options, "seed": seed}
        case specs.Quantize(bits, group, levels, rounding, seed):
            return {
                "codec": lib.CODEC_QUANTIZE,
                "variant": _index(specs.Levels, levels),
                "bits": bits,
                "row": group,
                "options": (rounding == "stochastic") * lib.CODEC_OPTION_STOCHASTIC,
                "seed": seed,
            }
        case specs.Truncate(_, rounding, levels, granularity, _, cap):
            options = (rounding == "truncate") * lib.CODEC_OPTION_CUT
            if spec.fixed_level is not None:
                how = {"variant": lib.CODEC_LEVELS_FIXED, "bits": spec.fixed_level}
            else:
                options |= (granularity == "bit") * lib.CODEC_OPTION_BITS
                how = {"variant": _index(specs.Sent, levels), "guard": spec.guard_bits}
            return {"codec": lib.CODEC_TRUNCATE, "cap": cap, "options": options, **how}
        case _:
            raise errors.SpecError(f"not a spec: {spec!r}")


def spec_of(struct: Any) -> Spec:
    """The inverse of spec_struct, but for what a frame does not say: seed, scale and clip."""
    stochastic: specs.Rounding = "stochastic" if struct.options & lib.CODEC_OPTION_STOCHASTIC else "nearest"
    variant = struct.variant
    row = struct.row if struct.row != lib.CODEC_ROW_LAST else 0  # which parts have different ones
    if struct.codec == lib.CODEC_SIGN:
        return specs.Sign(get_args(specs.SignScale)[variant], "row" if struct.row and not row else row or None)
    if struct.codec == lib.CODEC_TERNARY:
        return specs.Ternary(get_args(specs.Packing)[variant])
    if struct.codec == lib.CODEC_FLOAT8:
        return specs.Float8(
            get_args(specs.Format8)[variant],
            row or None,
            stochastic,
            "propagate" if struct.options & lib.CODEC_OPTION_PROPAGATE else "error",
            entropy=bool(struct.options & lib.CODEC_OPTION_ENTROPY),
        )
    if struct.codec == lib.CODEC_FLOAT4:
        return specs.Float4(get_args(specs.Format4)[variant], stochastic)
    if struct.codec == lib.CODEC_QUANTIZE:
        return specs.Quantize(struct.bits, row or 64, get_args(specs.Levels)[variant], stochastic)
    if struct.codec == lib.CODEC_TRUNCATE:
        cut: specs.Cut = "truncate" if struct.options & lib.CODEC_OPTION_CUT else "nearest"
        if struct.variant == lib.CODEC_LEVELS_FIXED:
            return specs.Truncate(struct.bits, cut, cap=struct.cap)
        granularity: specs.Granularity = "bit" if struct.options & lib.CODEC_OPTION_BITS else "six"
        levels = get_args(specs.Sent)[variant]
        return specs.Truncate("metric", cut, levels, granularity, struct.guard, struct.cap)
    return specs.Lossless(struct.cap, get_args(specs.Model)[struct.model])


def copy_contexts(context: Any, faults: Any, count: int) -> Any:
    """The same requests `count` times, each with a fault of its own: for other threads."""
    copies = ffi.new("codec_context[]", count)
    for i in range(count):
        copies[i] = context[0]
        copies[i].fault = faults + i
    return copies
