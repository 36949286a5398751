"""codec delta make, apply and compose: files, exit codes, and errors of one line."""

import json
import os
import shutil
import struct
import sys

import numpy as np
import pytest

import codec
from codec.weight_sync.files import diff_files
from support.command import run
from support.weight_updates import stepped, weights

NAMES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "uint8": "U8", "bool": "BOOL", "int64": "I64"}
NAMES |= {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64", "float4": "F4"}


def save(path, tensors, metadata=True):
    """Write a .safetensors file. A tensor of a dtype that numpy lacks is given as (dtype, shape, bytes)."""
    header, values = {"__metadata__": {"format": "pt"}} if metadata else {}, b""
    for name, x in tensors.items():
        dtype, shape, data = x if isinstance(x, tuple) else (NAMES[x.dtype.name], x.shape, x.tobytes())
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(values), len(values) + len(data)]}
        values += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)
    return path


@pytest.fixture
def files(tmp_path):
    """Write three versions of a model, which includes a packed FP4 tensor and a complex one."""
    more = {"fp4": ("F4", (6, 10), bytes(range(30))), "c": np.ones(3, np.complex64)}
    one = weights()
    two = stepped(one, 1)
    three = stepped(two, 2)
    paths = []
    for k, tensors in enumerate((one, two, three)):
        more["fp4"] = ("F4", (6, 10), bytes([k, *range(1, 30)]))
        paths.append(save(tmp_path / f"{k}.safetensors", tensors | more))
    return paths


def test_delta_and_apply_reproduce_the_file(files, tmp_path, capsys):
    assert run("delta", "make", files[0], files[1], "-o", tmp_path / "u") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{tmp_path}/u: version 0 to 1, ")
    assert run("delta", "apply", files[0], tmp_path / "u", "-o", tmp_path / "new") == 0
    assert (tmp_path / "new").read_bytes() == files[1].read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors", "2.safetensors", "new", "u"]


def test_compose_makes_one_update_of_a_chain(files, tmp_path, capsys):
    assert run("delta", "make", files[0], files[1], "-o", tmp_path / "u1") == 0
    assert run("delta", "make", files[1], files[2], "-o", tmp_path / "u2", "--version", 2) == 0
    assert run("delta", "compose", files[0], tmp_path / "u1", tmp_path / "u2", "-o", tmp_path / "u", "--json") == 0
    entries = json.loads("{" + capsys.readouterr().out.split("{")[-1])
    assert (entries["base"], entries["version"]) == (0, 2)
    direct = codec.Update.open(tmp_path / "u")
    assert run("delta", "make", files[0], files[2], "-o", tmp_path / "d", "--version", 2) == 0
    assert direct.digest == codec.Update.open(tmp_path / "d").digest
    for updates in ([tmp_path / "u"], [tmp_path / "u1", tmp_path / "u2"]):
        assert run("delta", "apply", files[0], *updates, "-o", tmp_path / "new", "--force") == 0
        assert (tmp_path / "new").read_bytes() == files[2].read_bytes()


def test_inspect_and_verify_know_updates(files, tmp_path, capsys):
    run("delta", "make", files[0], files[1], "-o", tmp_path / "u", "--json")
    made = json.loads(capsys.readouterr().out)
    assert run("inspect", tmp_path / "u", "--json") == 0
    assert json.loads(capsys.readouterr().out) == made
    assert made["ratio"] == made["nbytes"] / made["weights_nbytes"]
    assert run("verify", tmp_path / "u") == 0
    assert "a whole update to version 1" in capsys.readouterr().out
    data = bytearray((tmp_path / "u").read_bytes())
    data[-1] ^= 1
    (tmp_path / "u").write_bytes(data)
    assert run("verify", tmp_path / "u") == 1
    assert capsys.readouterr().err.count("\n") == 1


def failed(capsys, code, *arguments):
    """Run a command that fails with an exit code, and return its line on stderr."""
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("codec: ")
    assert err.count("\n") == 1
    return err


def test_wrong_bases_have_an_exit_code_of_their_own(files, tmp_path, capsys):
    run("delta", "make", files[0], files[1], "-o", tmp_path / "u1")
    run("delta", "make", files[1], files[2], "-o", tmp_path / "u2", "--version", 2)
    capsys.readouterr()
    new = tmp_path / "new"
    assert "needs the weights of version 1" in failed(capsys, 3, "delta", "apply", files[0], tmp_path / "u2", "-o", new)
    assert "applied already" in failed(capsys, 3, "delta", "apply", files[1], tmp_path / "u1", "-o", new)
    assert "or the result of the previous update" in failed(
        capsys, 3, "delta", "compose", files[0], tmp_path / "u2", "-o", new
    )
    assert not new.exists()


def test_errors_have_one_line_and_leave_no_file(files, tmp_path, capsys):
    other = save(tmp_path / "other.safetensors", {"x": np.ones(3, np.float32)})
    bad = tmp_path / "bad"
    bad.write_bytes(b"\x05\0\0\0\0\0\0\0{}")
    out = tmp_path / "out"
    assert "the base has no such tensor" in failed(capsys, 1, "delta", "make", files[0], other, "-o", out)
    assert "cannot be read" in failed(capsys, 1, "delta", "make", files[0], tmp_path / "none", "-o", out)
    assert "not a regular file" in failed(capsys, 1, "delta", "make", files[0], tmp_path, "-o", out)
    assert "not an update" in failed(capsys, 1, "delta", "apply", files[0], files[1], "-o", out)
    assert "its header would have 5 bytes" in failed(capsys, 1, "delta", "make", bad, files[1], "-o", out)
    assert "--version must be at least 1" in failed(
        capsys, 1, "delta", "make", files[0], files[1], "-o", out, "--version", 0
    )
    assert "exists: choose another name" in failed(capsys, 1, "delta", "make", files[0], files[1], "-o", other)
    assert "cannot be written" in failed(capsys, 1, "delta", "make", files[0], files[1], "-o", tmp_path / "no" / "out")
    assert not out.exists()


HOSTILE = [
    {"dtype": "F32", "shape": [3], "data_offsets": [0, 13]},
    {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]},
    {"dtype": "F32", "shape": [3], "data_offsets": [8, 4]},
    {"dtype": "F32", "shape": [3], "data_offsets": [0, 1 << 70]},
    {"dtype": "F32", "shape": "abc", "data_offsets": [0, 12]},
    {"dtype": "F32"},
    5,
]


@pytest.mark.parametrize("entry", HOSTILE)
def test_hostile_headers_are_errors(entry, files, tmp_path, capsys):
    text = json.dumps({"x": entry}).encode()
    path = tmp_path / "hostile"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    failed(capsys, 1, "delta", "make", path, files[0], "-o", tmp_path / "out")


def lax(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


A, B = ({"dtype": "F32", "shape": [2], "data_offsets": [begin, begin + 8]} for begin in (0, 8))
LAX = {
    "gap": lax({"a": A, "b": {**B, "data_offsets": [12, 20]}}, bytes(20)),
    "overlap": lax({"a": A, "b": {**B, "data_offsets": [4, 12]}}, bytes(12)),
    "trailing bytes": lax({"a": A, "b": B}, bytes(17)),
    "a name twice": lax(b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(B).encode() + b"}", bytes(16)),
    "metadata of numbers": lax({"__metadata__": {"step": 3}, "a": A, "b": B}, bytes(16)),
}


@pytest.mark.parametrize("name", LAX)
def test_files_that_safetensors_refuses_are_refused(name, tmp_path, capsys):
    path, good = tmp_path / "lax.safetensors", tmp_path / "good.safetensors"
    path.write_bytes(LAX[name])
    good.write_bytes(lax({"a": A, "b": B}, bytes(16)))
    run("delta", "make", good, good, "-o", tmp_path / "u")
    capsys.readouterr()
    for command in (
        ("delta", "make", path, good),
        ("delta", "make", good, path),
        ("delta", "apply", path, tmp_path / "u"),
        ("pack", path),
    ):
        assert "cannot be read: " in failed(capsys, 1, *command, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_apply_looks_before_it_copies(files, tmp_path, capsys, monkeypatch):
    """Devices, pipes, files of other formats or with other tensors are refused before anything is written."""
    run("delta", "make", files[0], files[1], "-o", tmp_path / "u")
    monkeypatch.setattr(shutil, "copyfileobj", lambda *_: pytest.fail("OLD is copied"))
    capsys.readouterr()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    with open(tmp_path / "sparse", "wb") as f:
        f.truncate(1 << 40)
    np.savez(tmp_path / "x.npz", x=np.ones(3))
    save(tmp_path / "other", {"x": np.ones(3, np.float32)})
    assert run("pack", files[0], "-o", tmp_path / "packed") == 0
    capsys.readouterr()
    for name, why in (
        ("pipe", "is not a regular file"), ("/dev/zero", "is not a regular file"), ("empty", "is empty"),
        ("sparse", "is of an unknown format"), ("x.npz", "is a .npz file, not a .safetensors file"),
        ("packed", "is packed: codec unpack restores"),
    ):  # fmt: skip
        assert why in failed(capsys, 1, "delta", "apply", tmp_path / name, tmp_path / "u", "-o", tmp_path / "out")
    assert "differ from those of" in failed(
        capsys, 3, "delta", "apply", tmp_path / "other", tmp_path / "u", "-o", tmp_path / "out"
    )


def test_apply_says_whose_header_the_result_has(files, tmp_path, capsys):
    run("delta", "make", files[0], files[1], "-o", tmp_path / "u")
    capsys.readouterr()
    assert run("delta", "apply", files[0], tmp_path / "u", "-o", tmp_path / "new") == 0
    assert capsys.readouterr().out.endswith(f" tensors, with the header of {files[0]}\n")


@pytest.mark.parametrize("metadata", [False, True])
def test_files_without_tensors_have_updates(metadata, tmp_path):
    old, new = (save(tmp_path / name, {}, metadata) for name in ("old", "new"))
    assert run("delta", "make", old, new, "-o", tmp_path / "update") == 0
    assert run("delta", "apply", old, tmp_path / "update", "-o", tmp_path / "result") == 0
    assert (tmp_path / "result").read_bytes() == new.read_bytes()


def test_updates_that_no_reader_accepts_replace_nothing(files, tmp_path, monkeypatch):
    (tmp_path / "u").write_bytes(b"old")
    monkeypatch.setattr(codec.weight_sync.updates.writing, "head_and_index", lambda *_: bytes(100))
    with pytest.raises(codec.FrameError):
        diff_files(str(files[0]), str(files[1]), str(tmp_path / "u"))
    assert (tmp_path / "u").read_bytes() == b"old"


def test_progress_is_shown_on_terminals_only(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run("delta", "make", files[0], files[1], "-o", tmp_path / "u") == 0
    err = capsys.readouterr().err
    assert "100%" in err
    assert err.endswith("\r")
