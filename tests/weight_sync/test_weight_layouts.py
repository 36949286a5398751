"""Updates bring the values of tensors in any layout: not contiguous, lazily computed, or of other libraries."""

import numpy as np
import pytest
import torch

import codec

RNG = np.random.default_rng(0)
LAYOUTS = {
    "transposed": lambda k: torch.randn(60 + k, 50).T,
    "transposed bfloat16": lambda k: torch.randn(60 + k, 50).bfloat16().T,
    "transposed float8": lambda k: torch.randn(60 + k, 50).to(torch.float8_e4m3fn).T,
    "channels_last": lambda k: torch.randn(8 + k, 6, 3, 3).to(memory_format=torch.channels_last),
    "slice": lambda k: torch.randn(64, 96 + k)[:, 8:72],
    "expanded": lambda k: torch.randn(1, 70 + k).expand(40, 70 + k),
    "every other column": lambda k: torch.randn(40, 70 + k)[:, ::2],
    "negative bit": lambda k: torch._neg_view(torch.randn(50 + k, 40)),
    "imaginary part of a conjugate": lambda k: torch.randn(50 + k, 40, dtype=torch.complex64).conj().imag,
    "numpy, reversed": lambda k: RNG.standard_normal((50 + k, 40))[::-1],
    "numpy, big-endian": lambda k: RNG.standard_normal((50 + k, 40)).astype(">f4"),
    "numpy, Fortran order": lambda k: np.asfortranarray(RNG.standard_normal((50 + k, 40))),
    "memoryview": lambda k: memoryview(RNG.standard_normal(2000 + k))[::2],
    "DLPack, not contiguous": lambda k: Exported(torch.randn(60 + k, 50).T),
}


class Exported:
    """Tensor that has only DLPack."""

    def __init__(self, tensor):
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__
        self.tensor = tensor


def values(x):
    """Return a tensor of any layout as a contiguous numpy array of bytes."""
    x = x.tensor if isinstance(x, Exported) else x
    if isinstance(x, torch.Tensor):
        return x.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().copy()
    x = np.ascontiguousarray(x)
    return x.astype(x.dtype.newbyteorder("=")).view(np.uint8)


def zeros(x):
    """Return zeros with the dtype and the shape of a tensor."""
    x = x.tensor if isinstance(x, Exported) else x
    if isinstance(x, torch.Tensor):
        return torch.zeros(tuple(x.shape), dtype=x.dtype)
    return np.zeros_like(np.asarray(x), np.asarray(x).dtype.newbyteorder("="), order="C")


@pytest.mark.parametrize("way", ["mapping", "pairs", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_has_the_values_of_tensors_in_any_layout(layout, way):
    # Many tensors, so that the memory of a contiguous copy that was freed too early is used again
    new = {f"{k}.weight": LAYOUTS[layout](k) for k in range(8)}
    old = {name: zeros(x) for name, x in new.items()}
    sender, receiver = codec.WeightSender(old), codec.WeightReceiver(old)
    receiver.apply(sender.diff(iter(new.items()) if way == "pairs" else new, full=way == "full"))
    for name, x in receiver.tensors(like=torch.empty(0)):
        assert np.array_equal(values(x), values(new[name])), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_base_has_the_values_of_tensors_in_any_layout(layout):
    new = {f"{k}.weight": LAYOUTS[layout](k) for k in range(4)}
    for name, x in codec.WeightReceiver(new).tensors(like=torch.empty(0)):
        assert np.array_equal(values(x), values(new[name])), name
