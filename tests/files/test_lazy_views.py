"""Lazily conjugated and negated tensors, whose values differ from their memory, are written with their values."""

import pytest
import torch

from codec.integrations.safetensors import load, load_file, save, save_file

Z = torch.randn(40, 30, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
VIEWS = {
    "conjugate": Z.conj(),
    "negative": torch._neg_view(Z.real.clone()),
    "negative bfloat16": torch._neg_view(Z.real.bfloat16()),
    "imaginary part of a conjugate": Z.conj().imag,
    "conjugate of a transposed tensor": Z.mT.conj(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_files_have_the_values_of_lazy_views(name, tmp_path):
    x = VIEWS[name]
    save_file({"x": x}, tmp_path / "x.safetensors")
    for y in (load_file(tmp_path / "x.safetensors")["x"], load(save({"x": x}))["x"]):
        assert torch.equal(y, x.resolve_conj().resolve_neg())
