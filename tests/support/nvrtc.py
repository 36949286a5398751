"""Interface to NVRTC, NVIDIA's run-time compiler for CUDA C++, which needs neither a GPU nor a driver."""

import ctypes
import re
import struct
from collections.abc import Sequence
from importlib.metadata import files
from typing import NamedTuple


class Compiled(NamedTuple):
    """Output of NVRTC. Kernels are named by their name expressions, not by their mangled names."""

    log: str
    ptx: str
    code_nbytes: dict[str, int]  # machine code in bytes, by kernel


def nvrtc() -> ctypes.CDLL:
    """Load NVRTC's library from its Python package."""
    installed = files("nvidia-cuda-nvrtc-cu12") or []
    return ctypes.CDLL(str(next(f.locate() for f in installed if re.fullmatch(r"libnvrtc\.so\.\d+", f.name))))


def compile_cuda(source: str, headers: dict[str, str], options: list[str], kernels: Sequence[str] = ()) -> Compiled:
    """Compile a source with the given headers; `kernels` are name expressions of its kernels."""
    lib, program = nvrtc(), ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", len(headers), texts, names)
    assert status == 0
    for name in kernels:
        assert lib.nvrtcAddNameExpression(program, name.encode()) == 0
    status = lib.nvrtcCompileProgram(program, len(options), arguments)
    log = _output(lib, program, "ProgramLog").decode()
    assert status == 0, log
    ptx = _output(lib, program, "PTX").decode()
    sizes = _code_sizes(_output(lib, program, "CUBIN"))
    for name in kernels:
        lowered = ctypes.c_char_p()
        assert lib.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)) == 0
        assert lowered.value is not None
        mangled = lowered.value.decode()
        log, ptx = log.replace(mangled, name), ptx.replace(mangled, name)
        sizes[name] = sizes.pop(mangled)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return Compiled(log, ptx, sizes)


def _output(lib: ctypes.CDLL, program: ctypes.c_void_p, kind: str) -> bytes:
    """Return one kind of output of a compiled program. The terminating 0 of texts is removed."""
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{kind}")(program, data)
    return data.raw if kind == "CUBIN" else data.value


def _code_sizes(image: bytes) -> dict[str, int]:
    """Return the machine code size in bytes of each kernel and function in an ELF file; {} if `image` is PTX."""
    if not image:
        return {}
    (at,), (each, count, names) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<3H", image, 58)
    sections = [struct.unpack_from("<II4Q", image, at + each * i) for i in range(count)]
    start = sections[names][4]
    found = {}
    for name, _, _, _, _, nbytes in sections:
        text = image[start + name : image.index(b"\0", start + name)].decode()
        if text.startswith(".text."):
            found[text.removeprefix(".text.")] = nbytes
    return found
