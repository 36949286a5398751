"""The C code and commands of docs/guides/embedding.md work from an empty folder with the installed package."""

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import codec
import codec.__main__ as cli
from support.tiers import HANG_SECONDS, every

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/embedding.md").read_text()
HEADING = re.compile(r"^## (.*)\n((?:(?!^## ).*\n)*)", re.MULTILINE)
SECTIONS = dict(HEADING.findall(PAGE))


def blocks(language, text=PAGE):
    """Return the page's code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command, folder):
    """Run a shell command in a folder, with this Python first in PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", command],
        check=False,
        cwd=folder,
        env={**os.environ, "PATH": path},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_c_code_of_the_page(tmp_path):
    """The page's C code and threads.h, which embedding.c tests, compile as C99 without a warning and succeed."""
    (tmp_path / "page.h").write_text("\n".join(blocks("c")))
    for source in ("tests/native/embedding.c", "examples/c/threads.h"):
        shutil.copy(ROOT / source, tmp_path)
    strict = "-std=c99 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Werror"
    run(f"cc {strict} embedding.c $(python -m codec --cflags --libs) -pthread -o embedding && ./embedding", tmp_path)


@pytest.fixture(scope="module", params=range(3), ids=["flags", "pkg-config", "cmake"])
def floats(request, tmp_path_factory):
    """Build examples/c/floats.c with one of the page's three commands, and return a function that runs it."""
    folder = tmp_path_factory.mktemp("floats") / "empty"
    shutil.copytree(ROOT / "examples/c", folder)
    commands = [b for b in blocks("sh", SECTIONS["Build"]) if "python -m codec" in b]
    assert len(commands) == 3
    run("cc -std=c99 -fsyntax-only -Wall -Wextra -Wpedantic -Werror floats.c $(python -m codec --cflags)", folder)
    run(commands[request.param], folder)

    def call(*args):
        done = subprocess.run([folder / "floats", *args], check=False, text=True, capture_output=True, env={})
        assert done.returncode in (0, 1)
        assert re.fullmatch("floats: .+\n" if done.returncode else "", done.stderr)
        return done.stderr

    return call


def test_floats_round_trip(floats, tmp_path):
    """The C program and the Python package write equal frames, and decode each other's."""
    x, frame, back = tmp_path / "x", tmp_path / "frame", tmp_path / "back"
    for n in (0, 1, 50_000):
        values = np.random.default_rng(n).standard_normal(n, np.float32)
        x.write_bytes(values.tobytes())
        assert floats("encode", x, frame) == ""
        assert frame.read_bytes() == codec.encode(values)
        assert floats("decode", frame, back) == ""
        assert back.read_bytes() == x.read_bytes()
    frame.write_bytes(codec.encode(values, codec.Quantize(4)))
    assert floats("decode", frame, back) == ""
    assert back.read_bytes() == codec.decode(frame.read_bytes()).tobytes()


def test_floats_rejects_other_files(floats, tmp_path):
    """For an invalid file, floats prints one line, returns 1 and writes nothing; an existing file is unchanged."""
    good = codec.encode(np.random.default_rng(0).standard_normal(2000, np.float32))
    bad = [good[:n] for n in (0, 3, 47, 48, 55, 56, 700, len(good) - 1)]
    for at in (0, 6, 17, 23, 30, 52, 60, 700, len(good) - 1):
        flipped = bytearray(good)
        flipped[at] ^= 1
        bad.append(bytes(flipped))
    large = bytearray(codec.encode(np.ones(1, np.float32)))  # a stored frame, whose header could declare any size
    struct.pack_into("<Q", large, 16, 56 + (4 << 38))
    struct.pack_into("<Q", large, 48, 1 << 38)
    bad += [good + b"\0", codec.encode(np.arange(9)), bytes(large)]
    frame, back = tmp_path / "frame", tmp_path / "back"
    for content in bad:
        frame.write_bytes(content)
        assert floats("decode", frame, back)
        assert list(tmp_path.iterdir()) == [frame]
    assert floats("decode", frame, back) == "floats: the frame is larger than we take\n"
    back.write_text("precious")
    assert floats("decode", frame, back)
    assert back.read_text() == "precious"
    assert floats("decode", tmp_path / "none", back)
    assert floats("encode", frame, tmp_path / "no such folder/frame")
    frame.write_bytes(b"12345")
    assert "not a file of float32" in floats("encode", frame, back)
    assert "encode|decode" in floats("encode", frame)


def test_cpp_of_page_compiles(tmp_path):
    (code,) = blocks("cpp", SECTIONS["All-reduce over Gloo"])
    declarations = """#include <codec/gloo.h>
#include <codec/gloo/connect.h>
void page(int rank, int size, std::shared_ptr<::gloo::rendezvous::Store> store,
          const ::gloo::transport::tcp::attr &attr, float *gradient, float *mine, float *all, size_t n)
"""
    (tmp_path / "page.cc").write_text(f"{declarations}{{\n{code}}}\n")
    run("g++ -std=c++17 -fsyntax-only -Wall -Wextra page.cc $(python -m codec --cflags)", tmp_path)


@pytest.mark.parametrize(
    "command", every(2, blocks("sh", SECTIONS["All-reduce over Gloo"])), ids=every(2, ["pkg-config", "cmake"])
)
def test_allreduce_example(command, tmp_path):
    """examples/gloo/allreduce.cc, built with the page's command, trains equal parameters on two ranks."""
    folder = tmp_path / "empty"
    shutil.copytree(ROOT / "examples/gloo", folder)
    strict = "-Wall -Wextra -Wpedantic -Wshadow -Werror"
    assert " -O2 " in command or "cmake" in command
    # Without -O2 the build takes half the time.
    run(f"export CXXFLAGS='{strict}'\n" + command.replace(" -O2 ", f" {strict} "), folder)
    (folder / "store").mkdir()
    ranks = [
        subprocess.Popen([folder / "allreduce", str(rank), "2", folder / "store"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=HANG_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = [re.fullmatch(r"rank \d: sent ([\d.]+) MB where .+ off by (\S+)\n", line) for line in said]
    assert all(found), said
    assert found[0].groups() == found[1].groups()
    sent, error = map(float, found[0].groups())
    assert sent < 12  # bits per value: 8, and the scales
    assert error < 0.01


def test_compiler_flags(tmp_path, monkeypatch, capsys):
    """`python -m codec` prints flags in the order of its options, shell-quoted; missing headers are an error."""
    package = tmp_path / "in a folder"
    (package / "include/codec").mkdir(parents=True)
    monkeypatch.setattr(codec._c, "PACKAGE", package)
    assert cli.main(["--cflags"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{package}/include has no C headers" in said.err
    (package / "include/codec/codec.h").touch()
    assert cli.main(["--libs", "--cflags"]) == 0
    lib = f"{package}/lib"
    expected = [f"-L{lib}", "-lcodec", f"-Wl,-rpath,{lib}", f"-I{package}/include"]
    assert shlex.split(capsys.readouterr().out) == expected
    assert cli.main(["--cmakedir", "--pkgconfigdir"]) == 0
    assert capsys.readouterr().out == f"{lib}/cmake/codec\n{lib}/pkgconfig\n"
    with pytest.raises(SystemExit) as caught:
        cli.main(["--libs", "advise", "x.npz", "--link", "1gbit"])
    assert caught.value.code == 2
