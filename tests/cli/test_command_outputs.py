"""Outputs of commands: permissions, devices and pipes, standard streams, signals, names with escape sequences."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pytest

import codec
from codec.files import packing
from support.command import run
from support.model_files import safetensors

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(codec.__file__))}
PROGRAM = f"{sys.executable} -P -m codec"


def shell(command, folder, **more):
    return subprocess.run(["bash", "-c", command], cwd=folder, env=ENVIRONMENT | more, capture_output=True, check=False)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors({"w": ("F32", (4,), bytes(16))}))
    return path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_outputs_are_as_private_as_the_inputs(model, tmp_path, umask):
    np.save(tmp_path / "x.npy", np.ones(3, np.float32))
    other = tmp_path / "n.safetensors"
    other.write_bytes(safetensors({"w": ("F32", (4,), bytes(15) + b"\1")}))
    commands = (
        ("pack", model, "-o", tmp_path / "p"), ("unpack", tmp_path / "p", "-o", tmp_path / "u"),
        ("pack", tmp_path / "x.npy", "-o", tmp_path / "c"), ("unpack", tmp_path / "c", "-o", tmp_path / "d"),
        ("delta", "make", other, model, "-o", tmp_path / "delta"),
        ("delta", "compose", other, tmp_path / "delta", "-o", tmp_path / "compose"),
        ("delta", "apply", other, tmp_path / "delta", "-o", tmp_path / "apply"),
    )  # fmt: skip
    for private in (False, True):
        for path in (model, tmp_path / "x.npy"):
            path.chmod(0o600 if private else 0o644)
        for command in commands:
            command[-1].unlink(missing_ok=True)
            assert run(*command) == 0
            assert mode(command[-1]) == (0o600 if private else 0o644), command
    assert os.umask(0o022) == 0o022  # the commands restore the umask


def test_devices_need_no_force_and_are_written_into(model, tmp_path, capsys):
    assert run("pack", model, "-o", "/dev/null") == 0
    assert run("delta", "make", model, model, "-o", "/dev/null") == 0
    assert stat.S_ISCHR(os.lstat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "pipe")
    assert run("pack", model, "-o", tmp_path / "pipe") == 1
    assert "no program reads from it" in capsys.readouterr().err
    (tmp_path / "dangling").symlink_to("nothing")
    assert run("pack", model, "-o", tmp_path / "dangling") == 1
    assert "exists: choose another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"),
    [("pack m", "-"), ("pack m", "/dev/stdout"), ("pack m", "link"), ("delta make m n", "-"), ("delta apply m u", "-")],
)
def test_names_of_standard_output_are_equal(model, tmp_path, command, name):
    """The output is the same for `-` and for other names of standard output, and no line of the report is in it."""
    model.rename(tmp_path / "m")
    (tmp_path / "n").write_bytes(safetensors({"w": ("F32", (4,), bytes(15) + b"\1")}))
    (tmp_path / "link").symlink_to("/dev/stdout")
    assert run("delta", "make", tmp_path / "m", tmp_path / "n", "-o", tmp_path / "u") == 0
    words = [tmp_path / word if len(word) == 1 else word for word in command.split()]
    assert run(*words, "-o", tmp_path / "file") == 0
    done = shell(f"{PROGRAM} {command} -o {name} > out", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "file").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "m", "n", "out", "u"]
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_no_temporary_file(model, tmp_path, monkeypatch, number):
    files = []

    def killed(*_, **__):
        files.extend(p.name for p in tmp_path.iterdir())
        os.kill(os.getpid(), number)

    monkeypatch.setattr(packing, "pack", killed)
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with pytest.raises(SystemExit) as e:
            run("pack", model, "-o", tmp_path / "p")
        assert e.value.code == 128 + number
        assert len(files) == 2
        assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_ignored_signals_stay_ignored(model, tmp_path, monkeypatch):
    """A command under nohup goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pack = packing.pack

    def hung_up(*given, **how):
        os.kill(os.getpid(), signal.SIGHUP)
        return pack(*given, **how)

    monkeypatch.setattr(packing, "pack", hung_up)
    try:
        assert run("pack", model, "-o", tmp_path / "p") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_closed_standard_streams(model, tmp_path):
    done = shell(f"{PROGRAM} pack m.safetensors -o p <&- 2>&-", tmp_path)
    assert (done.returncode, done.stdout.startswith(b"p: 1 tensor")) == (0, True)
    done = shell(f"{PROGRAM} pack missing -o q 2>&-", tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")  # the error is not printed on standard output
    assert shell(f"{PROGRAM} ls m.safetensors >&-", tmp_path).returncode == 0
    for command in ("pack --dtype float32", "pack - -o q", "unpack -", "verify -", "inspect -"):
        done = shell(f"{PROGRAM} {command} <&-", tmp_path)
        assert done.returncode == 1
        assert done.stderr == b"codec: standard input is closed: name a file to read\n"
    done = shell(f"{PROGRAM} pack m.safetensors -o - >&-", tmp_path)
    assert (done.returncode, done.stderr) == (1, b"codec: standard output is closed: pass -o FILE\n")


def test_names_are_printed_without_control_characters(tmp_path, capsys):
    memory = io.BytesIO()
    np.save(memory, np.ones(3, np.float32))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("\x1b]0;title\x07.npy", memory.getvalue())
        archive.writestr("\x1b[31m.txt", b"no array")
    path = tmp_path / "b\x1b[31m.npz"
    (tmp_path / "a.npz").rename(path)
    assert run("ls", path) == 0
    assert run("pack", path, "-o", tmp_path / "b\x1b[0m") == 0
    assert run("inspect", tmp_path / "b\x1b[0m") == 0
    assert run("verify", tmp_path / "b\x1b[0m") == 0
    assert run("ls", tmp_path / "\x1b[0m") == 1
    out, err = capsys.readouterr()
    assert "\\x1b]0;title\\x07" in out
    assert "\x1b" not in out + err
    assert run("ls", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "\x1b]0;title\x07"


def test_names_beyond_the_locale_are_printed_as_escapes(tmp_path):
    (tmp_path / "m").write_bytes(safetensors({"\u00e4": ("F32", (1,), bytes(4))}))
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(safetensors({"w": ("F32", (1,), bytes(4))}))
    done = shell(f"{PROGRAM} ls m", tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\xe4 " in done.stdout
    done = shell(f"{PROGRAM} pack $'\\xff' -o $'\\xfe'", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
