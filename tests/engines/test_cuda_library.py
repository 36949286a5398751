"""The Python engine loads its kernels from libcodec_cuda if that library is installed."""

import json
import runpy
import subprocess

import numpy as np
import pytest

import codec
from codec._c import library as native
from codec.engines.cuda import kernels, library
from codec.engines.cuda.kernels import KERNELS
from support import cuda_c, cupy_on_cpu, device
from support.cupy_on_cpu import cupy

code_for = library.code_for.__wrapped__  # the function without its lru_cache
X = np.random.default_rng(0).standard_normal((40, 300), np.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a libcodec_cuda whose image for sm_90 is machine code of the emulated CuPy."""
    folder, images = tmp_path_factory.mktemp("library"), runpy.run_path(str(cuda_c.API / "images.py"))
    names = {f"_Z{name}": name for name in images["expressions"]()}
    code = json.dumps(names).encode() + b"\0"
    images["write_images"](folder, [images["Image"](arch, code, list(names)) for arch in ("90", "ptx80")])
    path = folder / "libcodec_cuda.so"
    subprocess.run([*cuda_c.library_command(folder / "images.c"), "-o", str(path)], check=True)
    return path


@pytest.fixture
def offer(monkeypatch):
    """Emulate a machine with a GPU; return a function that sets the library for the engine to load."""
    cupy_on_cpu.install(monkeypatch, device.build())
    monkeypatch.setattr(library, "code_for", code_for)
    return lambda path: monkeypatch.setenv("CODEC_CUDA_LIBRARY", str(path))


@pytest.fixture
def compiled(monkeypatch):
    """Return a list that grows by the name of each kernel file that the engine compiles."""
    files, compile_kernels = [], kernels._compile

    def log(nvrtc, file, *rest):
        files.append(file)
        return compile_kernels(nvrtc, file, *rest)

    monkeypatch.setattr(kernels, "_compile", log)
    return files


def frames_of(x):
    return [codec.encode(x, spec) for spec in (codec.Lossless(), codec.Quantize(4), codec.Float8(entropy=True))]


def test_no_kernel_is_compiled(built, offer, compiled):
    """With the library, no kernel is compiled, and frames, values and sums equal the native engine's."""
    offer(built)
    there, expected = cupy.array(X), frames_of(X)
    frames = frames_of(there)
    assert [bytes(frame.get()) for frame in frames] == expected
    for ours, theirs in zip(frames, expected, strict=True):
        assert codec.decode(ours, like=there).get().tobytes() == codec.decode(theirs).tobytes()
    assert codec.reduce(frames[1:2] * 3, like=there).get().tobytes() == codec.reduce(expected[1:2] * 3).tobytes()
    assert compiled == []


def test_the_library_has_every_kernel(built, offer):
    offer(built)
    code = library.code_for("sm_90")
    assert code.names.keys() >= KERNELS.keys()
    assert code.names["encode_rows<2>"] == "_Zencode_rows<2>"
    assert json.loads(code.image[:-1])["_Zencode_rows<2>"] == "encode_rows<2>"
    assert library.code_for("sm_75") is None


def test_options_for_the_compiler_are_obeyed(built, offer, compiled, monkeypatch):
    offer(built)
    monkeypatch.setenv("CODEC_NVRTC_OPTIONS", "-lineinfo")
    codec.encode(cupy.array(X))
    assert "lossless/encode_fast" in compiled


def test_other_architectures_are_compiled(built, monkeypatch, compiled, tmp_path):
    """Kernels for sm_80, for which the library has only PTX, are compiled by NVRTC."""
    monkeypatch.setenv("CODEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library, "code_for", code_for)
    monkeypatch.setenv("CODEC_CUDA_LIBRARY", str(built))
    [code] = kernels.load(["close_frame"], "sm_80")
    assert code.image.startswith(b"\x7fELF")
    assert compiled == ["frame/close"]


def test_no_library_is_no_error(offer, compiled, monkeypatch, tmp_path):
    monkeypatch.delenv("CODEC_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    codec.encode(cupy.array(X))
    assert "lossless/encode_fast" in compiled


@pytest.mark.parametrize("library_of", ["other sources", "libcodec.so", "missing"])
def test_named_libraries_that_do_not_fit_are_errors(library_of, offer, tmp_path):
    """A library given by name raises if its kernels differ, if it lacks the function, or if the file is no library."""
    paths = {"other sources": cuda_c.library(), "libcodec.so": native._path, "missing": tmp_path / "missing.so"}
    offer(paths[library_of])
    said = "has other kernels than this package" if library_of == "other sources" else "cannot be used as libcodec_cuda"
    with pytest.raises(codec.EngineError, match=said):
        codec.encode(cupy.array(X))


def test_libraries_of_the_package_with_other_kernels_are_not_used(offer, compiled, monkeypatch, tmp_path):
    """The package's library is ignored if its kernels differ from the sources, as in a changed checkout."""
    monkeypatch.delenv("CODEC_CUDA_LIBRARY", raising=False)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcodec_cuda.so").symlink_to(cuda_c.library())
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    codec.encode(cupy.array(X))
    assert "lossless/encode_fast" in compiled
