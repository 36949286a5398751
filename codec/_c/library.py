"""Loading of the C library, tables of dtypes, conversion of statuses to exceptions, choice of the instruction set."""

import ctypes
import os
import sys
from typing import Any

from codec import errors
from codec._c import PACKAGE, _cffi
from codec.errors import Status

ffi: Any = _cffi.ffi
# libcodec.so is in the package folder of the generated module _cffi, which may differ from the folder of this file
_path = os.environ.get("CODEC_LIBRARY") or str(PACKAGE / "lib/libcodec.so")
# RTLD_NODELETE: daemon threads may run library code when the interpreter exits
lib: Any = ffi.dlopen(_path, ffi.RTLD_NOW | ffi.RTLD_NODELETE)
if lib.codec_abi_version() != lib.CODEC_ABI_VERSION:
    raise ImportError(
        f"{_path} has ABI version {lib.codec_abi_version()}, but this package needs {lib.CODEC_ABI_VERSION}: unset "
        "CODEC_LIBRARY, or install the package again"
    )

DTYPES: dict[str, int] = {
    name.removeprefix("CODEC_").lower(): number for number, name in ffi.typeof("codec_dtype").elements.items()
}
DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
ITEMSIZE: dict[str, int] = {name: lib.codec_dtype_nbytes(number) for name, number in DTYPES.items()}
UNSIGNED = {name: f"u{nbytes}" for name, nbytes in ITEMSIZE.items()}  # NumPy dtypes of the values' bits
MANTISSA_BITS: dict[str, int] = {  # number of mantissa bits, for dtypes that Truncate accepts
    name: bits for name, number in DTYPES.items() if (bits := lib.codec_mantissa_bits(number))
}
LEVEL_BITS: dict[str, tuple[int, ...]] = {  # number of mantissa bits that each of the levels 0 to 3 drops
    name: tuple(lib.codec_level_bits(DTYPES[name], level) for level in range(4)) for name in MANTISSA_BITS
}

_OF_SPECS = (Status.BAD_SPEC, Status.BAD_SCALE, Status.ROUNDED_SCALE)
_OF_BASES = (Status.OTHER_BASE, Status.ALREADY_APPLIED)
_OF_STATES = (Status.MISSING_STATE, Status.OTHER_STATE, Status.MISSING_BASE, *_OF_BASES)
_NUMBERS: dict[int, str] = {  # formats of the numbers of bytes that a fault has
    Status.TRUNCATED: "{} bytes, {} are needed",
    Status.TRAILING: "{} bytes, the frame has {}",
    Status.LIMIT: "{} bytes, the limit is {}",
}
_FRAME_ERRORS: dict[int, type[errors.FrameError]] = {
    Status.CHECKSUM: errors.ChecksumError,
    Status.UNSUPPORTED: errors.UnsupportedError,
    Status.LIMIT: errors.LimitError,
}


def check(status: int, fault: Any = None) -> None:
    """Raise the exception for a status code; return if it is 0.

    ``fault`` is a C struct ``codec_fault``, which locates the error in a frame; its contents are added to the message.
    """
    if status == 0:
        return
    text: str = ffi.string(lib.codec_strerror(status)).decode()
    if status in _OF_STATES:
        raise errors.StateError(text + _digests(status, fault), status)
    if status == Status.UNKNOWN_CODEBOOK:
        raise errors.StateError(f"{text}: id {fault.found:#018x}", status)
    if status < Status.TRUNCATED:
        if status == Status.SHAPE_MISMATCH and fault is not None:
            text += f" (the frame has {fault.found}, the destination {fault.expected})"
        raise (errors.SpecError if status in _OF_SPECS else errors.ArgumentError)(text, status)
    error = _FRAME_ERRORS.get(status, errors.FrameError)
    if fault is None:
        raise error(text, status)
    where = f"byte {fault.offset}: found {fault.found:#x}, expected {fault.expected:#x}"
    if status in _NUMBERS:
        where = _NUMBERS[status].format(fault.found, fault.expected)
    raise error(f"{text} ({where})", status, fault.offset, fault.found, fault.expected)


def _digests(status: int, fault: Any) -> str:
    """Return text with the expected and the actual digest of a wrong base, for a message; "" for other statuses."""
    if fault is None or status not in _OF_BASES:
        return ""
    return f" (the base of the frame has the digest {fault.found:#018x}, the given one {fault.expected:#018x})"


_new_uninitialized = ffi.new_allocator(should_clear_after_alloc=False)
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
_HUGE = 1 << 21  # bytes of a huge page


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Advise the kernel to use huge pages for new memory, as numpy does for its arrays.

    With pages of 4 KiB, page faults can take longer than encoding.
    """
    begin, end = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    if _madvise is not None and end - begin >= _HUGE:
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 14)  # MADV_HUGEPAGE; failure is ignored


def new_bytes(n: int) -> Any:
    """Allocate a C array of ``n`` uninitialized bytes."""
    memory = _new_uninitialized("uint8_t[]", n)
    if n >= 2 * _HUGE:
        ask_for_huge_pages(int(ffi.cast("uintptr_t", memory)), n)
    return memory


def isas() -> tuple[str, ...]:
    """Return the names of the instruction sets that this machine can use, slowest first."""
    return tuple(name for i, name in enumerate(_isa_names) if lib.codec_isa_usable(i))


def _names() -> tuple[str, ...]:
    """Return the names of all instruction sets for which the library has code."""
    names: list[str] = []
    while (p := lib.codec_isa_name(len(names))) != ffi.NULL:
        names.append(ffi.string(p).decode())
    return tuple(names)


_isa_names = _names()
chosen_isa: int | None = None  # number for codec_context.isa; None: CODEC_ISA has not been read yet


class _IsaGuard:
    """Context manager that restores the previous choice of instruction set."""

    def __init__(self, previous: int | None) -> None:
        self._previous = previous

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global chosen_isa
        chosen_isa = self._previous


def use_isa(name: str | None) -> _IsaGuard:
    """Select an instruction set of :func:`isas` for this process; None: the fastest one. For tests and benchmarks.

    Frames and decoded values do not depend on it. Before the first call, the environment variable ``CODEC_ISA`` selects
    it. The returned context manager restores the previous choice on exit.

    Raises
    ------
    EngineError
        The library or this machine does not support the instruction set.
    """
    global chosen_isa
    previous, chosen_isa = chosen_isa, _number_of(name)
    return _IsaGuard(previous)


def _number_of(name: str | None) -> int:
    """Return the number of an instruction set for ``codec_context.isa``; 0: the fastest one."""
    if name is not None and not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.EngineError(f"name must be one of {', '.join(isas())}, or None, got a {type(name).__name__}")
    if name and name not in isas():
        raise errors.EngineError(
            f"instruction set {name!r} is not usable on this machine: use one of {', '.join(isas())}"
        )
    return _isa_names.index(name) + 1 if name else 0


def current_isa() -> int:
    """Return the number for ``codec_context.isa``; the first call reads ``CODEC_ISA``."""
    global chosen_isa
    if chosen_isa is None:
        try:
            chosen_isa = _number_of(os.environ.get("CODEC_ISA"))
        except errors.EngineError as e:
            raise errors.EngineError(f"CODEC_ISA: {e}") from None
    return chosen_isa
