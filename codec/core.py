"""The C library: loaded once, its status turned into exceptions, its structs filled in."""

import os
import threading
from pathlib import Path
from typing import Any, get_args

from codec import _cffi, errors, specs  # pyright: ignore[reportAttributeAccessIssue] - written by the build
from codec.specs import Spec

ffi: Any = _cffi.ffi
# beside the generated module, which need not lie beside this file
_path = os.environ.get("CODEC_LIBRARY") or str(Path(_cffi.__file__).with_name("lib") / "libcodec.so")
lib: Any = ffi.dlopen(_path)
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


SMALL_TENSOR = 1 << 16  # bytes: frames of such are built in a thread's own buffer and copied
SMALL_FRAME = (1 << 16) + 256  # the bound of a tensor of 64 KiB
SMALL_SCRATCH = 1 << 20

_new_uninitialized = ffi.new_allocator(should_clear_after_alloc=False)


def new_bytes(n: int) -> Any:
    """Uninitialized bytes."""
    return _new_uninitialized("uint8_t[]", n)


class _PerThread(threading.local):
    """Structs and buffers that calls of one thread reuse: small tensors would spend most of their time here."""

    def __init__(self) -> None:
        self.fault = ffi.new("codec_fault *")
        self.context = new_context(self.fault)
        self.tensor = ffi.new("codec_tensor *")
        self.tensor.struct_nbytes = ffi.sizeof("codec_tensor")
        self.written = ffi.new("size_t *")
        self.size = ffi.new("size_t *")
        self.info = ffi.new("codec_info *")
        self.info.struct_nbytes = ffi.sizeof("codec_info")
        self.scratch: Any = None
        self.frame = new_bytes(SMALL_FRAME)

    def small_scratch(self) -> Any:
        """SMALL_SCRATCH bytes, enough for any tensor of 64 KiB."""
        if self.scratch is None:
            self.scratch = new_bytes(SMALL_SCRATCH)
        return self.scratch

    def get_scratch(self, nbytes: int) -> Any:
        """At least nbytes."""
        return self.small_scratch() if nbytes <= SMALL_SCRATCH else new_bytes(nbytes)


_spec_structs: dict[Spec, Any] = {}


def spec_struct(spec: Spec) -> Any:
    """The C struct of a spec; they are few and kept."""
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
    variant, last = struct.variant, struct.row == lib.CODEC_ROW_LAST
    if struct.codec == lib.CODEC_SIGN:
        return specs.Sign(get_args(specs.SignScale)[variant], "row" if last else struct.row or None)
    if struct.codec == lib.CODEC_TERNARY:
        return specs.Ternary(get_args(specs.Packing)[variant])
    if struct.codec == lib.CODEC_FLOAT8:
        return specs.Float8(
            get_args(specs.Format8)[variant],
            None if last else struct.row,
            stochastic,
            "propagate" if struct.options & lib.CODEC_OPTION_PROPAGATE else "error",
            entropy=bool(struct.options & lib.CODEC_OPTION_ENTROPY),
        )
    if struct.codec == lib.CODEC_FLOAT4:
        return specs.Float4(get_args(specs.Format4)[variant], stochastic)
    if struct.codec == lib.CODEC_QUANTIZE:
        return specs.Quantize(struct.bits, struct.row, get_args(specs.Levels)[variant], stochastic)
    if struct.codec == lib.CODEC_TRUNCATE:
        cut: specs.Cut = "truncate" if struct.options & lib.CODEC_OPTION_CUT else "nearest"
        if struct.variant == lib.CODEC_LEVELS_FIXED:
            return specs.Truncate(struct.bits, cut, cap=struct.cap)
        granularity: specs.Granularity = "bit" if struct.options & lib.CODEC_OPTION_BITS else "six"
        levels = get_args(specs.Sent)[variant]
        return specs.Truncate("metric", cut, levels, granularity, struct.guard, struct.cap)
    return specs.Lossless(struct.cap, get_args(specs.Model)[struct.model])


def own_tensor(dtype: int, shape: tuple[int, ...], data: Any, nbytes: int) -> Any:
    """Fill in this thread's codec_tensor."""
    t = local.tensor
    t.dtype = dtype
    t.rank = len(shape)
    for i, s in enumerate(shape):
        t.shape[i] = s
    t.data = data
    t.nbytes = nbytes
    return t


def new_context(fault: Any) -> Any:
    """A codec_context that asks for nothing."""
    c = ffi.new("codec_context *")
    c.struct_nbytes = ffi.sizeof("codec_context")
    c.fault = fault
    return c


def copy_context(context: Any, fault: Any) -> Any:
    """The same requests, for another thread."""
    c = ffi.new("codec_context *", context[0])
    c.fault = fault
    return c


def own_context(flags: int = 0, max_nbytes: int = 0, stream: int = 0, into: int = 0, weight: float = 1) -> Any:
    """Reset this thread's codec_context: no segments, codebooks or residual."""
    c = local.context
    c.isa = current_isa()
    c.flags = flags
    c.max_nbytes = max_nbytes
    c.nsegments = c.ncodebooks = 0
    c.stream = stream
    c.into = into
    c.weight = weight
    c.residual = c.metric = c.levels = ffi.NULL
    return c


local = _PerThread()
