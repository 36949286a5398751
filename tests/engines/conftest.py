"""Fixtures for tests of the CUDA engine: kernels compiled for the CPU, emulated or real devices, libcodec_cuda."""

import os

import pytest

from support import cuda_c, cupy_on_cpu
from support.cuda_calls import GPU
from support.device import Emulated, Real, build, use


@pytest.fixture(scope="session")
def library():
    """Return the library of CUDA kernels, compiled for the CPU."""
    return build(options=os.environ.get("CUDA_ON_CPU_FLAGS", "").split())


@pytest.fixture(params=["cpu", GPU])
def device(request, monkeypatch):
    """Return an emulated GPU, once directly and once behind an emulated CuPy; with ``-m gpu``, a real GPU."""
    if request.param == "cpu":
        device = Emulated(request.getfixturevalue("library"))
        use(monkeypatch, device)
        return device
    if request.param == "cupy":
        cupy_on_cpu.install(monkeypatch, request.getfixturevalue("library"))
    return Real(monkeypatch)


@pytest.fixture(scope="module", params=["cpu", GPU])
def cuda(request):
    """Return libcodec_cuda on a fake CUDA driver that runs on the CPU, or with ``-m gpu`` on a GPU."""
    if request.param == "gpu":
        gpu = cuda_c.Gpu()
        with pytest.MonkeyPatch.context() as m:
            m.setattr(cuda_c.Memory, "allocate", staticmethod(gpu.allocate))
            yield cuda_c.Cuda(gpu, cuda_c.installed())
        return
    flags = os.environ.get("CUDA_ON_CPU_FLAGS", "").split()
    emulated = build(options=flags)
    fake = cuda_c.driver(emulated._name, str(cuda_c.kernels(flags)))
    yield cuda_c.Cuda(fake, cuda_c.library())
