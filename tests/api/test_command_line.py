"""Commands accept regular files of known formats, read only the bytes needed, and print one line on failure."""

import io
import json
import os
import struct
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from codec.__main__ import main
from codec.files.arrays import arrays_of

X = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)
FRAME = bytes(codec.encode(X))
SPARSE = 1 << 40


def run(capsys, *arguments):
    """Run a command that fails, and return its line on stderr."""
    assert main([str(each) for each in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("codec: ")
    assert err.count("\n") == 1
    return err


def sparse(path, head):
    """Create a sparse file of 1 TiB that begins with `head`."""
    path.write_bytes(head)
    os.truncate(path, SPARSE)
    return path


def test_command_alone_lists_the_commands(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in ("advise", "inspect", "verify", "warmup", "--cflags", "python -m codec.run --help"):
        assert name in out
    with pytest.raises(SystemExit) as e:
        main(["--cflags", "warmup"])
    assert e.value.code == 2
    assert "not both" in capsys.readouterr().err


def test_help_of_warmup_says_who_needs_it(capsys):
    with pytest.raises(SystemExit) as e:
        main(["warmup", "--help"])
    assert e.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Only programs that choose this engine need it" in text
    assert "default: float32 bfloat16" in text


@pytest.mark.parametrize("command", ["inspect", "verify", "advise --link 1gbit"])
def test_commands_reject_files_that_are_not_regular(command, tmp_path, capsys):
    name, *options = command.split()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    began = time.monotonic()
    for path in (tmp_path, tmp_path / "fifo", "/dev/zero", "/dev/null"):
        assert "it is not a regular file" in run(capsys, name, path, *options)
    for path in (tmp_path / "none", tmp_path / "loop", "", "\udcff", "a\0b", "/proc/self/mem"):
        assert "cannot be read" in run(capsys, name, path, *options)
    assert time.monotonic() - began < 5
    assert r"'\x1b[31m\n' cannot be read" in run(capsys, name, "\x1b[31m\n", *options)


def test_commands_read_little_of_large_files(tmp_path, capsys):
    path = sparse(tmp_path / "large", FRAME)
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nbytes"] == len(FRAME)
    assert "(1099511627776 bytes, the frame has " in run(capsys, "verify", path)
    for head in (b"", b"PK\3\4", (SPARSE - 8).to_bytes(8, "little") + b"{"):
        path = sparse(tmp_path / "empty", head)
        run(capsys, "inspect", path)
        run(capsys, "verify", path)
        assert "cannot be read" in run(capsys, "advise", path, "--link", "1gbit")


def test_inspect_reads_side_section_behind_the_header(tmp_path, capsys):
    book = codec.Codebook.from_tensors(X)
    frame = codec.encode(codec.view(X, segments=[(0, (10, 100)), (1000, (3000,))]), codebook=book)
    (tmp_path / "frame").write_bytes(frame)
    assert main(["inspect", str(tmp_path / "frame"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["codebook_id"] == book.id


def test_commands_read_standard_input(monkeypatch, capsys):
    def feed(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    feed(FRAME)
    assert main(["inspect", "-"]) == 0
    feed(FRAME)
    assert main(["verify", "-"]) == 0
    assert "-: a whole frame" in capsys.readouterr().out
    for wrong in (b"", FRAME[:20], FRAME[:-1], FRAME + b"x", bytes(1000)):
        feed(wrong)
        run(capsys, "verify", "-")


def test_verify_stops_reading_endless_input(monkeypatch, capsys):
    class Endless(io.BytesIO):
        def read(self, size):
            return super().read(size).ljust(size, b"x")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Endless(FRAME)))
    assert "bytes follow the end of the frame" in run(capsys, "verify", "-")


def test_verify_reports_each_file(tmp_path, capsys):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(FRAME)
    bad.write_bytes(FRAME[:-8] + bytes(8))
    assert main(["verify", str(bad), str(tmp_path / "none"), str(good)]) == 1
    out, err = capsys.readouterr()
    assert out == f"{good}: a whole frame\n"
    assert [str(bad) in err.splitlines()[0], "none cannot be read" in err.splitlines()[1]] == [True, True]


def safetensors(path, entries, data, metadata=True):
    """Write a .safetensors file with the given entries, (dtype, shape, begin, end) by array, and data bytes."""
    header = {k: {"dtype": d, "shape": s, "data_offsets": [b, e]} for k, (d, s, b, e) in entries.items()}
    text = json.dumps(header | ({"__metadata__": {"format": "pt"}} if metadata else {})).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_advise_reads_npz_npy_and_safetensors(tmp_path, capsys):
    half = X.astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", a=X, step=np.int64(3))
    np.save(tmp_path / "a.npy", X)
    bits = X.nbytes, X.nbytes + half.nbytes
    entries = {"a": ("F32", [40, 100], 0, X.nbytes), "b": ("BF16", [4000], *bits), "c": ("F4", [0], 0, 0)}
    safetensors(tmp_path / "x.safetensors", entries, X.tobytes() + half.tobytes())
    for name, known in (("x.npz", "a"), ("a.npy", "a"), ("x.safetensors", "a, b")):
        assert main(["advise", str(tmp_path / name), "--link", "1mbit", "--threads", "1"]) == 0
        out, err = capsys.readouterr()
        assert f"measuring {known}:" in err
        assert "hook = codec.torch.ddp_hook(codec.Lossless(" in out
    found = arrays_of(str(tmp_path / "x.safetensors"), ["a", "b"], None)
    assert (found["a"].tobytes(), found["b"].tobytes()) == (X.tobytes(), half.tobytes())
    assert (found["a"].shape, found["b"].dtype) == (X.shape, ml_dtypes.bfloat16)
    assert list(arrays_of(str(tmp_path / "x.safetensors"), [], "bfloat16")) == ["b"]


def test_safetensors_is_read_without_ml_dtypes(tmp_path, monkeypatch):
    path = safetensors(tmp_path / "x.safetensors", {"a": ("BF16", [3], 0, 6)}, b"abcdef")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    found = arrays_of(str(path), [], "bfloat16")
    assert codec.inspect(codec.encode(codec.view(found["a"], "bfloat16"))).dtype == "bfloat16"


WRONG_ENTRIES = [
    ("F32", [2], 0, 9),
    ("F32", [2], 4, 12),
    ("F32", [3], 0, 8),
    ("F32", [-2], 0, 8),
    ("F32", [1 << 70], 0, 8),
    ("F32", [2.0], 0, 8),
    ("F32", None, 0, 8),
    ("F32", [2], -8, 0),
    ("F32", [2], None, 8),
    (["F32"], [2], 0, 8),
]


@pytest.mark.parametrize("entry", WRONG_ENTRIES, ids=str)
def test_advise_refuses_damaged_safetensors(entry, tmp_path, capsys):
    path = safetensors(tmp_path / "x.safetensors", {"a": entry}, bytes(8))
    assert "cannot be read" in run(capsys, "advise", path, "a", "--link", "1gbit")


@pytest.mark.parametrize("text", [b"{", b"{}", b'{"a": 5}', b'{"a": {}}', b"{" * 100_000, b'{"\xff": 1}'], ids=len)
def test_advise_refuses_damaged_safetensors_headers(text, tmp_path, capsys):
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text)
    run(capsys, "advise", tmp_path / "x", "--link", "1gbit")


def test_advise_never_unpickles(tmp_path, capsys):
    """advise rejects files of torch.save and object arrays; the message says how to convert the file."""
    for new in (True, False):
        torch.save({"w": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
        err = run(capsys, "advise", tmp_path / "a.pt", "--link", "1gbit")
        assert "numpy.savez" in err
        assert "safetensors" in err
    np.savez(tmp_path / "x.npz", a=np.array([object()] * 3))
    np.save(tmp_path / "x.npy", np.array([object()] * 3))
    for name in ("x.npz", "x.npy"):
        err = run(capsys, "advise", tmp_path / name, "--link", "1gbit")
        assert "Python objects" in err
        assert "allow_pickle" not in err


def test_advise_lists_the_arrays_of_a_file(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", a=np.arange(5), b=np.float32(1))
    err = run(capsys, "advise", tmp_path / "x.npz", "--link", "1gbit")
    assert (
        "has no array of float16, bfloat16, float32 with at least one dimension (its arrays: a (int64), b (float32))"
        in err
    )
    (tmp_path / "text").write_text("nothing of the kind\n")
    assert "not a .npz, .npy or .safetensors file" in run(capsys, "advise", tmp_path / "text", "--link", "1gbit")
    assert Path(tmp_path / "text").exists()
