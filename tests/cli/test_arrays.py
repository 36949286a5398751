"""codec pack and unpack of arrays and streams, from files and pipes."""

import io
import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import codec
from codec.cli import arrays
from support.command import run

X = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)


def failed(capsys, *arguments):
    capsys.readouterr()
    assert run(*arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err[:7], err.count("\n")) == ("", "codec: ", 1)
    return err


def test_array_files_become_frames(tmp_path, capsys):
    np.save(tmp_path / "x.npy", X)
    assert run("pack", tmp_path / "x.npy") == 0
    assert "x.npy.codec: 16 kB to " in capsys.readouterr().out
    assert np.array_equal(codec.decode((tmp_path / "x.npy.codec").read_bytes()), X)
    (tmp_path / "x.npy").unlink()
    assert run("unpack", tmp_path / "x.npy.codec") == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), X)
    assert run("pack", tmp_path / "x.npy", "--codec", "Quantize(4)", "-o", tmp_path / "q", "--json") == 0
    assert codec.inspect((tmp_path / "q").read_bytes()).spec == codec.Quantize(4)
    error = failed(capsys, "pack", tmp_path / "x.npy", "--codec", "Quantize(99)", "-o", tmp_path / "z")
    assert error == "codec: bits must be an int from 1 to 8, got 99\n"
    error = failed(capsys, "unpack", tmp_path / "x.npy", "-o", tmp_path / "z")
    assert f"{tmp_path / 'x.npy'} is a .npy file, not a packed file" in error


def test_array_files_are_read_from_a_pipe(tmp_path):
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-P", "-m", "codec", "pack", "-o", tmp_path / "frame"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        process.communicate((tmp_path / "x.npy").read_bytes())
    assert process.returncode == 0
    assert np.array_equal(codec.decode((tmp_path / "frame").read_bytes()), X)


def test_streams_become_a_frame_for_each_block(tmp_path, monkeypatch, capsysbinary):
    monkeypatch.setattr(arrays, "_BLOCK", 6000)
    bits = X.astype(ml_dtypes.bfloat16).tobytes()

    def feed(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
        monkeypatch.setattr(arrays, "_size", lambda source: 0)

    feed(bits)
    assert run("pack", "--dtype", "bfloat16") == 0
    frames = capsysbinary.readouterr().out
    feed(frames)
    assert run("unpack") == 0
    assert capsysbinary.readouterr().out == bits
    feed(frames)
    assert run("unpack", "-o", tmp_path / "y.npy") == 0
    assert np.load(tmp_path / "y.npy").tobytes() == bits
    # Frames that are shorter than the first read, which is meant for a header
    feed(b"".join(codec.encode(np.uint8([k])) for k in range(5)))
    assert run("unpack") == 0
    assert capsysbinary.readouterr().out[-5:] == bytes(range(5))


def test_raw_files_with_a_shape_are_one_frame(tmp_path, capsys):
    (tmp_path / "x").write_bytes(X.tobytes())
    assert run("pack", tmp_path / "x", "--dtype", "float32", "--shape", "40,100") == 0
    assert codec.inspect((tmp_path / "x.codec").read_bytes()).shape == (40, 100)
    assert "do not" not in capsys.readouterr().err
    for shape in ("41,100", "39,100", "1" + "0" * 30, "-1", "a"):
        assert "shape" in failed(capsys, "pack", tmp_path / "x", "--dtype", "float32", "--shape", shape, "-o", "z")
    assert "for raw values pass --dtype" in failed(capsys, "pack", tmp_path / "x", "-o", tmp_path / "z")
    (tmp_path / "odd").write_bytes(bytes(6))
    assert "multiple of 4 bytes" in failed(capsys, "pack", tmp_path / "odd", "--dtype", "float32", "-o", tmp_path / "z")
    assert not (tmp_path / "z").exists()


def test_damaged_frames_leave_no_file(tmp_path, capsys):
    frame = bytes(codec.encode(X))
    claims = bytearray(codec.encode(np.zeros(0, np.float32)))
    for k, data in enumerate(
        (frame[:-1], b"x" + frame, frame + b"x", frame[:500] + b"\0" + frame[501:], claims + b"x")
    ):
        path = tmp_path / f"{k}.codec"
        path.write_bytes(data)
        failed(capsys, "unpack", path)
        assert not (tmp_path / str(k)).exists()
    (tmp_path / "two.codec").write_bytes(frame + frame)
    assert "several arrays" in failed(capsys, "unpack", tmp_path / "two.codec", "-o", tmp_path / "two.npy")
    (tmp_path / "none.codec").write_bytes(b"")
    assert "is empty" in failed(capsys, "unpack", tmp_path / "none.codec", "-o", tmp_path / "n.npy")
    assert "raw values, not" in failed(capsys, "unpack", tmp_path / "two.codec", "-o", tmp_path / "two.pt")
    (tmp_path / "two.npy").write_bytes(frame)
    assert "does not end in .codec" in failed(capsys, "unpack", tmp_path / "two.npy")


def test_pickled_arrays_are_refused(tmp_path, capsys):
    np.save(tmp_path / "o.npy", np.array([object()]), allow_pickle=True)
    assert "cannot be read as a .npy file" in failed(capsys, "pack", tmp_path / "o.npy")


def test_json_reports_sizes(tmp_path, capsys):
    np.save(tmp_path / "x.npy", X)
    run("pack", tmp_path / "x.npy", "--json")
    entries = json.loads(capsys.readouterr().out)
    assert entries["input_nbytes"] == X.nbytes
    assert entries["output_nbytes"] == os.path.getsize(tmp_path / "x.npy.codec")


@pytest.mark.parametrize("text", ["Quantize(99)", "tiny", "Quantize(", "__import__('os')"])
def test_wrong_codecs_are_errors(text, tmp_path, capsys):
    np.save(tmp_path / "x.npy", X)
    failed(capsys, "pack", tmp_path / "x.npy", "--codec", text)


def test_errors_of_specs_name_no_position(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones(3, np.float32))
    assert run("pack", tmp_path / "x.npy", "--codec", "Quantize(4") == 1
    assert capsys.readouterr().err.endswith("got 'Quantize(4': '(' was never closed\n")
