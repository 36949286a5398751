"""codec.integrations.safetensors loads packed and plain files with the same results as the package safetensors."""

import json
import resource
import struct

import numpy as np
import pytest
import safetensors.torch as plain
import torch
from safetensors import safe_open as plain_open

import codec
from codec.files import packing
from codec.integrations.safetensors import load, load_file, safe_open, save, save_file
from support.command import run

torch.manual_seed(0)
TENSORS = {
    "weight": torch.randn(300, 256),
    "half": torch.randn(64, 32, 4).to(torch.bfloat16),
    "fp8": torch.randn(100).to(torch.float8_e4m3fn),
    "step": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "mask": torch.rand(99) < 0.5,
}


def equal(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


@pytest.fixture
def paths(tmp_path):
    """Write tensors to a plain and to a packed file, and return both paths."""
    plain.save_file(TENSORS, tmp_path / "plain", metadata={"format": "pt"})
    save_file(TENSORS, tmp_path / "packed", metadata={"format": "pt"})
    return tmp_path / "plain", tmp_path / "packed"


def test_load_file_gives_the_tensors(paths):
    for path in paths:
        found = load_file(path)
        assert found.keys() == TENSORS.keys()
        assert all(equal(found[name], TENSORS[name]) for name in TENSORS)
    assert (paths[1].stat().st_size) < 0.9 * paths[0].stat().st_size
    found = load_file(paths[1], framework="numpy")
    assert np.array_equal(found["weight"], TENSORS["weight"].numpy())
    assert load_file(paths[1], device="meta")["weight"].is_meta


def test_safe_open_agrees_with_safetensors(paths):
    with plain_open(paths[0], "pt") as want:
        for path in paths:
            with safe_open(path, framework="pt") as got:
                assert sorted(got.keys()) == sorted(want.keys())
                assert sorted(got.offset_keys()) == sorted(want.offset_keys())
                assert got.metadata() == want.metadata()
                for name in TENSORS:
                    assert equal(got.get_tensor(name), want.get_tensor(name))
                    assert got.get_slice(name).get_shape() == want.get_slice(name).get_shape()
                    assert got.get_slice(name).get_dtype() == want.get_slice(name).get_dtype()


INDEXES = [
    np.s_[3], np.s_[-1], np.s_[10:20], np.s_[:, 5], np.s_[-4:, 1:3], np.s_[290:999], np.s_[20:10], np.s_[...],
    np.s_[..., 0], np.s_[5, 6], np.s_[::7], np.s_[3:200:50, ::2], np.s_[[5, 1, 250]], True, None,
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_slices_agree_with_indexing(index, paths, monkeypatch):
    monkeypatch.setattr(packing, "_STEP", 1 << 16)
    save_file(TENSORS, paths[1])
    with safe_open(paths[1], "pt") as f:
        assert equal(f.get_slice("weight")[index], TENSORS["weight"][index])


def test_slices_decode_their_rows_only(paths, monkeypatch):
    monkeypatch.setattr(packing, "_STEP", 1 << 16)
    save_file(TENSORS, paths[1])
    with safe_open(paths[1], "pt") as f:
        decoded = []
        model = f._models[0]
        monkeypatch.setattr(type(model), "decode", lambda self, part, out: decoded.append(part.begin))
        f.get_slice("weight")[64:128]
        assert decoded == [1 << 16]


def test_tied_weights_are_stored_once(tmp_path):
    w = TENSORS["weight"]
    save_file({"w": w, "tied": w, "copy": w.clone()}, tmp_path / "m")
    save_file({"w": w}, tmp_path / "one")
    assert (tmp_path / "m").stat().st_size < (tmp_path / "one").stat().st_size + 400
    found = load_file(tmp_path / "m")
    assert all(equal(found[name], w) for name in found)


def test_memory_and_files_agree(paths):
    data = save(TENSORS, {"format": "pt"})
    assert data == paths[1].read_bytes()
    assert all(equal(x, TENSORS[name]) for name, x in load(data).items())
    assert load(paths[0].read_bytes()).keys() == TENSORS.keys()


def test_sharded_models_are_read_as_one(tmp_path):
    names = list(TENSORS)
    for k in range(2):
        save_file({n: TENSORS[n] for n in names[k::2]}, tmp_path / f"{k}.safetensors")
    weight_map = {n: f"{i % 2}.safetensors" for i, n in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = load_file(index)
    assert found.keys() == TENSORS.keys()
    with safe_open(index, "pt") as f:
        assert sorted(f.keys()) == sorted(names)
        assert all(equal(f.get_tensor(n), found[n]) for n in names)


def test_errors_say_what_to_do(paths, tmp_path):
    with pytest.raises(codec.ArgumentError, match="framework must be one of pt"):
        safe_open(paths[1], "jax")
    with safe_open(paths[1], "pt") as f:
        with pytest.raises(codec.ArgumentError, match="no tensor 'x'"):
            f.get_tensor("x")
        with pytest.raises(IndexError):
            f.get_slice("weight")[300]
    with pytest.raises(codec.ArgumentError, match="closed"):
        f.get_tensor("weight")
    with pytest.raises(codec.ArgumentError, match="cannot be read"):
        load_file(tmp_path / "none")
    with pytest.raises(codec.ArgumentError, match="dtype"):
        save_file({"c": torch.ones(3, dtype=torch.complex128)}, tmp_path / "c")
    with pytest.raises(codec.ArgumentError, match="mapping of str to str"):
        save_file(TENSORS, tmp_path / "c", metadata={"epoch": 3})
    with pytest.raises(codec.ArgumentError, match="__metadata__"):
        save_file({"__metadata__": TENSORS["weight"]}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    for limited in (lambda: load_file(paths[1], max_nbytes=1000), lambda: load(paths[1].read_bytes(), max_nbytes=1000)):
        with pytest.raises(codec.LimitError, match="more than max_nbytes, 1000"):
            limited()
    bad = bytearray(paths[1].read_bytes())
    bad[-200] ^= 1
    with pytest.raises(codec.FrameError):
        load(bytes(bad))


def test_unwritable_files_are_errors_and_old_ones_stay(paths, tmp_path):
    before = paths[1].read_bytes()
    with pytest.raises(codec.ArgumentError):
        save_file({"w": TENSORS["weight"], "bad": torch.ones(2, dtype=torch.complex128)}, paths[1])
    assert paths[1].read_bytes() == before
    with pytest.raises(codec.ArgumentError, match="cannot be written"):
        save_file(TENSORS, tmp_path / "no" / "file")


def _bits(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


SMALL_FLOATS = {
    "fp4": _bits(64, 32).view(torch.float4_e2m1fn_x2),
    "flat": _bits(6).view(torch.float4_e2m1fn_x2),
    "none": _bits(0, 8).view(torch.float4_e2m1fn_x2),
    "large": _bits(600, 256).view(torch.float4_e2m1fn_x2),
    "scale": _bits(64, 4).view(torch.float8_e8m0fnu),
    "fnuz4": _bits(5, 3).view(torch.float8_e4m3fnuz),
    "fnuz5": _bits(5, 3).view(torch.float8_e5m2fnuz),
}


def test_floats_of_4_and_8_bits_agree_with_safetensors(tmp_path, capsys):
    plain.save_file(SMALL_FLOATS, tmp_path / "plain")
    save_file(SMALL_FLOATS, tmp_path / "packed")
    assert run("unpack", tmp_path / "packed", "-o", tmp_path / "unpacked") == 0
    for found in (
        plain.load_file(tmp_path / "unpacked"),
        load_file(tmp_path / "packed"),
        load_file(tmp_path / "plain"),
    ):
        assert found.keys() == SMALL_FLOATS.keys()
        assert all(equal(found[name], x) for name, x in SMALL_FLOATS.items())
    with safe_open(tmp_path / "packed", "pt") as got, plain_open(tmp_path / "plain", "pt") as want:
        for name, x in SMALL_FLOATS.items():
            part = got.get_slice(name)
            assert (part.get_shape(), part.get_dtype()) == (
                want.get_slice(name).get_shape(), want.get_slice(name).get_dtype()
            )  # fmt: skip
            for index in (slice(1, 3), slice(None, None, 2), slice(5, 2), ..., *([1, -1] if len(x) else [])):
                assert equal(part[index].view(torch.uint8), x[index].view(torch.uint8))


def test_errors_of_dtypes_are_true(tmp_path):
    save_file(SMALL_FLOATS, tmp_path / "packed")
    with pytest.raises(codec.ArgumentError, match="dtype F4, which numpy lacks: read torch tensors instead"):
        load_file(tmp_path / "packed", framework="numpy")
    odd = plain_bytes({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, bytes(3))
    with pytest.raises(codec.ArgumentError, match="the last dimension must be even"):
        load(odd)
    six = plain_bytes({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, bytes(3))
    with pytest.raises(
        codec.ArgumentError, match=f"dtype F6_E2M3, which torch {torch.__version__} lacks".replace("+", ".")
    ):
        load(six)
    wrong = plain_bytes({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 3]}}, bytes(3))
    with pytest.raises(codec.ArgumentError, match="do not match"):
        load(wrong)


def plain_bytes(header, data):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_save_file_fails_as_documented_on_a_full_disk(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(codec.ArgumentError, match=f"cannot be written: File too large .folder '{tmp_path}'"):
            save_file({"w": torch.randn(100, 100)}, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_file(tmp_path / "x")["w"].tolist() == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
