"""Pages that codec.integrations.lmcache makes of LMCache's chunks. tests/rollouts runs the serde in LMCache itself."""

import importlib
import sys
import types

import pytest
import torch

LAYERS, TOKENS, HEADS, SIZE = 2, 256, 4, 64
NAMES = {
    "distributed.api": ["MemoryLayoutDesc", "ObjectKey"],
    "distributed.serde.async_processor": ["AsyncSerdeProcessor"],
    "distributed.serde.base": ["Deserializer", "SerdeProcessor", "Serializer"],
    "memory_management": ["MemoryObj"],
}


@pytest.fixture
def lmcache(monkeypatch):
    """Import the adapter with stand-ins for LMCache's classes."""
    for name in ("lmcache", "lmcache.v1", "lmcache.v1.distributed", "lmcache.v1.distributed.serde"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, classes in NAMES.items():
        module = types.ModuleType(name)
        for each in classes:
            setattr(module, each, type(each, (), {}))
        monkeypatch.setitem(sys.modules, f"lmcache.v1.{name}", module)
    factory = types.ModuleType("factory")
    factory.get_registered_serde_types = lambda: []
    factory.register_serde_factory = lambda *_: None
    monkeypatch.setitem(sys.modules, "lmcache.v1.distributed.serde.factory", factory)
    monkeypatch.delitem(sys.modules, "codec.integrations.lmcache", raising=False)
    yield importlib.import_module("codec.integrations.lmcache")
    del sys.modules["codec.integrations.lmcache"]


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.fixture
def sides():
    """Return keys, of which a few channels are large, and values, in bfloat16: (layers, tokens, heads, channels)."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn((2, LAYERS, TOKENS, HEADS, SIZE), generator=generator)
    key += 20 * (torch.rand((HEADS, SIZE), generator=generator) > 0.9)
    return key.to(torch.bfloat16), value.to(torch.bfloat16)


def stored(settings, x):
    """Encode and decode a chunk; return it, and the size of its encoding as a fraction."""
    out, pages = torch.empty_like(x), settings.codec_of(x.shape, x.dtype)
    data = pages.encode(settings.page(x))
    assert len(data) <= settings.slot_nbytes([x.shape], [x.dtype])
    pages.decode(data, out=settings.page(out))
    return out, len(data) / (x.numel() * 2)


@pytest.mark.parametrize("bits", [(8, 4), (8, 8), (4, 4), (4, 8)])
def test_fused_keys_and_values_have_the_errors_of_separate_ones(lmcache, sides, bits):
    fused = torch.cat(sides, -1).flatten(2).unsqueeze(0)
    apart, size = stored(lmcache.SerdeSettings(*bits), torch.stack(sides).flatten(3))
    apart = apart.unflatten(3, (HEADS, SIZE))
    for head_size in (SIZE, None):
        found, fused_size = stored(lmcache.SerdeSettings(*bits, head_size=head_size), fused)
        found = found[0].unflatten(2, (HEADS, 2 * SIZE)).split(SIZE, -1)
        for side in (0, 1):
            assert error(found[side], sides[side]) < 1.1 * error(apart[side], sides[side])
        assert fused_size < (1.01 * size if head_size else 0.57 if max(bits) == 8 else 0.3)


def test_chunks_of_one_side_are_lossless_if_keys_or_values_are(lmcache, sides):
    fused = torch.cat(sides, -1).flatten(2)
    for settings in (
        lmcache.SerdeSettings(slot=1),
        lmcache.SerdeSettings(None, 4, slot=1),
        lmcache.SerdeSettings(8, None, slot=1),
    ):
        for x in (fused, fused.unsqueeze(0)):
            assert torch.equal(stored(settings, x)[0], x)


def test_head_size_must_fit_the_rows(lmcache):
    for head_size in (0, "64", 1.5):
        with pytest.raises(ValueError, match="head_size must be the number of channels of a key"):
            lmcache.SerdeSettings(8, 8, head_size=head_size)
    with pytest.raises(ValueError, match="head_size=96: a row of the chunk has 512 values"):
        lmcache.SerdeSettings(8, 8, head_size=96).codec_of(torch.Size((1, 2, 64, 512)), torch.bfloat16)
