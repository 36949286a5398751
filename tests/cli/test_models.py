"""codec pack, unpack and ls: files of every format, shards, standard input and output, and errors of one line."""

import io
import json
import os
import resource
import sys
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch

from codec.integrations.safetensors import load_file, save_file
from support.command import run
from support.model_files import safetensors

PLAIN = safetensors()


def failed(capsys, *arguments):
    """Run a command that fails with exit code 1, and return its line on stderr."""
    assert run(*arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("codec: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(PLAIN)
    return path


def test_pack_and_unpack_restore_the_file(model, tmp_path, capsys):
    assert run("pack", model) == 0
    assert "model.codec.safetensors: 16 tensors, " in capsys.readouterr().out
    assert run("unpack", tmp_path / "model.codec.safetensors", "-o", tmp_path / "again", "--json") == 0
    assert json.loads(capsys.readouterr().out)["output_nbytes"] == len(PLAIN)
    assert (tmp_path / "again").read_bytes() == PLAIN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "model.codec.safetensors", "model.safetensors"]


def test_outputs_are_replaced_by_force_only(model, tmp_path, capsys):
    packed = tmp_path / "model.codec.safetensors"
    packed.write_bytes(b"precious")
    assert "exists: choose another name, or pass --force to replace the file" in failed(capsys, "pack", model)
    assert packed.read_bytes() == b"precious"
    assert "is the input" in failed(capsys, "pack", model, "-o", model, "--force")
    assert "is a folder" in failed(capsys, "pack", model, "-o", tmp_path, "--force")
    assert run("pack", model, "--force") == 0
    capsys.readouterr()
    assert "exists" in failed(capsys, "unpack", packed)
    packed.write_bytes(packed.read_bytes()[:-1])
    assert "cannot be read" in failed(capsys, "unpack", packed, "--force")
    assert model.read_bytes() == PLAIN


def test_standard_input_and_output(model, tmp_path, monkeypatch, capsysbinary):
    def feed(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))

    feed(PLAIN)
    assert run("pack", "-") == 0
    packed, err = capsysbinary.readouterr()
    assert err == b""
    feed(packed)
    assert run("unpack", "-") == 0
    assert capsysbinary.readouterr().out == PLAIN
    assert run("pack", model, "-o", tmp_path / "p") == 0
    assert (tmp_path / "p").read_bytes() == packed


def test_ls_lists_tensors_of_every_file(model, tmp_path, capsys):
    run("pack", model)
    np.savez(tmp_path / "a.npz", w=np.ones((2, 3), np.float32), step=np.int64(3))
    torch.save({"w": torch.ones(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "a.pt")
    capsys.readouterr()
    assert run("ls", tmp_path / "model.codec.safetensors") == 0
    out = capsys.readouterr().out
    assert "equal to weight" in out or "equal to tied" in out
    assert out.splitlines()[1].split()[:4] == ["weight", "F32", "300x128", "154"]
    for name, shapes in (("a.npz", {"w": [2, 3], "step": []}), ("a.pt", {"w": [2, 3], "b": [3]})):
        assert run("ls", tmp_path / name, "--json") == 0
        assert {row["name"]: row["shape"] for row in json.loads(capsys.readouterr().out)} == shapes


def test_tensors_of_npz_and_pt_files_are_restored(tmp_path, capsys):
    x = np.random.default_rng(0).standard_normal((50, 60)).astype(np.float32)
    half = torch.from_numpy(x).to(torch.bfloat16)
    np.savez(tmp_path / "a.npz", w=x, step=np.int64(3))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("README.txt", "no array")
    old = {"_use_new_zipfile_serialization": False}
    torch.save({"epoch": 3, "model": {"w": half, "v": half.t()}}, tmp_path / "b.pt", **old)
    np.save(tmp_path / "c.npy", x)
    for name, *how in (("a.npz",), ("b.pt", "--key", "model"), ("c.npy",)):
        assert run("pack", tmp_path / name, "-o", tmp_path / f"{name}.safetensors", *how) == 0
    assert capsys.readouterr().err == f"codec: {tmp_path}/a.npz: left out, because they are not arrays: README.txt\n"
    for name, suffix in (("a.npz", ".npz"), ("b.pt", ".pt"), ("b.pt", ".npz"), ("c.npy", ".pt")):
        assert run("unpack", tmp_path / f"{name}.safetensors", "-o", tmp_path / f"{name}.again{suffix}") == 0
    with np.load(tmp_path / "a.npz.again.npz") as found:
        assert (found["w"].tobytes(), found["step"]) == (x.tobytes(), 3)
    found = torch.load(tmp_path / "b.pt.again.pt", weights_only=True)
    assert torch.equal(found["w"], half)
    assert torch.equal(found["v"], half.t())
    with np.load(tmp_path / "b.pt.again.npz") as found:
        assert np.array_equal(found["w"].view(ml_dtypes.bfloat16).astype(np.float32), half.float().numpy())
    assert "epoch (int), model (dict): choose the key of such a dict by --key" in failed(
        capsys_cleared(capsys), "pack", tmp_path / "b.pt", "-o", tmp_path / "d"
    )
    assert "has no key 'x'" in failed(capsys, "pack", tmp_path / "b.pt", "-o", tmp_path / "d", "--key", "x")


def capsys_cleared(capsys):
    capsys.readouterr()
    return capsys


def test_arrays_with_one_name_are_refused(tmp_path, capsys):
    """A zip file may hold a name twice, and members `a` and `a.npy` are both array `a`."""
    for second in ("a.npy", "a"):
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zipfile warns of the second member
            for member, n in (("a.npy", 3), (second, 4)):
                memory = io.BytesIO()
                np.save(memory, np.ones(n, np.float32))
                archive.writestr(member, memory.getvalue())
        for command in ("pack", "ls", "bench"):
            assert "has two arrays named 'a'" in failed(capsys, command, tmp_path / "x.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def test_arrays_x_and_x_npy_are_different(tmp_path):
    """numpy looks up "x.npy" among the members of a file first, where it is array "x"."""
    arrays = {"x": np.zeros((2, 3), np.float32), "x.npy": np.ones(5, np.float32), "x.npy.npy": np.ones(2, np.float64)}
    np.savez(tmp_path / "x.npz", **arrays)
    assert run("pack", tmp_path / "x.npz", "-o", tmp_path / "p") == 0
    found = load_file(tmp_path / "p", framework="numpy")
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], x) for name, x in arrays.items())
    assert run("unpack", tmp_path / "p", "-o", tmp_path / "y.npz") == 0
    written, read = (sorted(zipfile.ZipFile(tmp_path / name).namelist()) for name in ("y.npz", "x.npz"))
    assert written == read


@pytest.mark.parametrize("name", ["a\0b", "a" * 66000, "\ud800"])
def test_names_that_zip_files_cannot_hold_are_refused(name, tmp_path, capsys):
    save_file({name: torch.ones(3), "a": torch.ones(3)}, tmp_path / "p")
    assert "cannot be written to a .npz file" in failed(capsys, "unpack", tmp_path / "p", "-o", tmp_path / "x.npz")
    assert run("unpack", tmp_path / "p", "-o", tmp_path / "x.pt") == 0
    assert torch.load(tmp_path / "x.pt").keys() == {name, "a"}


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
def test_full_disk_while_unpacking_is_one_line(suffix, tmp_path, capsys):
    save_file({"w": torch.randn(100, 100)}, tmp_path / "p")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert "cannot be written: File too large" in failed(
            capsys, "unpack", tmp_path / "p", "-o", tmp_path / f"x{suffix}"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_pickles_that_run_code_are_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    assert "holds objects of posix.system; save" in failed(capsys, "pack", tmp_path / "evil.pt")
    assert "weights_only=True" in failed(capsys, "ls", tmp_path / "evil.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["evil.pt"]


def test_shards_are_packed_into_a_folder(tmp_path, capsys):
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in names.items():
        (tmp_path / file).write_bytes(safetensors({name: ("F32", (3,), bytes(range(12)))}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert run("pack", index, "-o", tmp_path / "packed") == 0
    assert "packed: 2 tensors" in capsys.readouterr().out
    assert run("unpack", tmp_path / "packed" / index.name, "-o", tmp_path / "again") == 0
    for file in (*names.values(), index.name):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()
    capsys.readouterr()
    assert "pass -o FOLDER" in failed(capsys, "pack", index)
    for name in ("../outside", "-", "", ".", "..", "a\0b", "folder/", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "files of its folder" in failed(capsys, "pack", index, "-o", tmp_path / "p2")
    assert not (tmp_path / "p2").exists()


def test_shards_are_packed_only_if_all_outputs_are_free(tmp_path, capsys):
    names = {"a": "1.safetensors", "b": "2.safetensors"}
    for file in names.values():
        (tmp_path / file).write_bytes(PLAIN)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "2.safetensors").touch()
    assert "2.safetensors exists" in failed(capsys, "pack", index, "-o", tmp_path / "packed")
    assert [p.name for p in (tmp_path / "packed").iterdir()] == ["2.safetensors"]


def test_errors_say_what_a_file_is(model, tmp_path, capsys):
    run("pack", model)
    capsys.readouterr()
    (tmp_path / "g.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "empty").write_bytes(b"")
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    packed = tmp_path / "model.codec.safetensors"
    assert "a GGUF file" in failed(capsys, "pack", tmp_path / "g.gguf")
    assert "is empty" in failed(capsys, "pack", tmp_path / "empty")
    assert "packed already" in failed(capsys, "pack", packed)
    assert "not packed" in failed(capsys, "unpack", model, "-o", tmp_path / "x")
    assert "a .npz file, not a packed file" in failed(capsys, "unpack", tmp_path / "a.npz", "-o", tmp_path / "x")
    assert "is packed without loss" in failed(capsys, "pack", model, "--codec", "small", "-o", tmp_path / "x")
    assert "a .npz file, not a frame: codec ls" in failed(capsys, "inspect", tmp_path / "a.npz")
    assert "has no checksums" in failed(capsys, "verify", model)
    assert "cannot be read" in failed(capsys, "pack", tmp_path / "none")
    assert "cannot be written" in failed(capsys, "pack", model, "-o", tmp_path / "no" / "out")
    assert "threads must be an int of at least 1" in failed(capsys, "pack", model, "-o", tmp_path / "x", "--threads", 0)
    assert not (tmp_path / "x").exists()


def test_inspect_and_verify_know_packed_files(model, tmp_path, capsys):
    run("pack", model)
    capsys.readouterr()
    packed = tmp_path / "model.codec.safetensors"
    assert run("inspect", packed, "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert (entries["kind"], entries["tensors"], entries["equal"]) == ("a packed model file", 16, 1)
    assert run("inspect", model) == 0
    assert run("verify", packed) == 0
    assert "a whole packed file of 16 tensors" in capsys.readouterr().out
    data = bytearray(packed.read_bytes())
    data[len(data) // 2] ^= 1
    packed.write_bytes(data)
    assert str(packed) in failed(capsys, "verify", packed)
