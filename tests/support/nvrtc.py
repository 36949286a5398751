"""NVRTC, NVIDIA's run-time compiler for CUDA C++. It needs neither a GPU nor a driver."""

import ctypes
import re
from collections.abc import Sequence
from importlib.metadata import files


def nvrtc() -> ctypes.CDLL:
    """Load NVRTC's library from its Python package."""
    installed = files("nvidia-cuda-nvrtc-cu12") or []
    return ctypes.CDLL(str(next(f.locate() for f in installed if re.fullmatch(r"libnvrtc\.so\.\d+", f.name))))


def compile_cuda(
    source: str, headers: dict[str, str], options: list[str], kernels: Sequence[str] = ()
) -> tuple[str, str]:
    """Compile a source with the given headers; return the log and the PTX.

    Both name kernels by the expressions in `kernels` in place of mangled names.
    """
    lib, program = nvrtc(), ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", len(headers), texts, names)
    assert status == 0
    for name in kernels:
        assert lib.nvrtcAddNameExpression(program, name.encode()) == 0
    status = lib.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    texts_found = [log.value.decode(), ptx.value.decode()]
    for name in kernels:
        lowered = ctypes.c_char_p()
        assert lib.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)) == 0
        assert lowered.value is not None
        texts_found = [text.replace(lowered.value.decode(), name) for text in texts_found]
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return texts_found[0], texts_found[1]
