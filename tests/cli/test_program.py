"""The program `codec` as a whole: help, exit codes, completion, doctor and bench."""

import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest

import codec
from codec.__main__ import main
from codec._c.library import isas
from codec.cli import main as program
from codec.cli import updates

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(codec.__file__))}


def test_help_lists_all_commands_and_exit_codes(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in ["pack", "unpack", "ls", "bench", "doctor", "completion", "delta"]:
        assert name in out
    for name in ("pack", "inspect", "delta", "bench"):
        with pytest.raises(SystemExit) as e:
            main([name, "--help"])
        assert e.value.code == 0
        assert "xit codes: 0" in " ".join(capsys.readouterr().out.split())


def test_commands_import_neither_torch_nor_weight_sync():
    """Commands start quickly, because modules that only some commands need are imported when those commands run."""
    code = (
        "import sys; from codec.__main__ import main; main(['--cflags']);"
        "bad = {'torch', 'tqdm', 'matplotlib', 'zstandard', 'codec.weight_sync', 'numba'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=ENVIRONMENT, capture_output=True)


def test_closed_pipes_and_interrupts_are_quiet(tmp_path, monkeypatch, capsys):
    np.save(tmp_path / "x.npy", np.ones(3))

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(program.doctor, "run_doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")
    command = f"{sys.executable} -P -m codec doctor | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_full_disks_are_errors_of_one_line(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones(3))
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "codec", "pack", str(tmp_path / "x.npy"), "-o", "-"],
            env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("codec: ")
    assert done.stderr.count("\n") == 1


def test_completion_scripts_know_commands_and_options(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode == 0
    for word in ("unpack", "--force", "--link"):
        assert word in script
    for shell in ("zsh", "fish", "tcsh"):
        assert main(["completion", shell]) == 0
        assert "unpack" in capsys.readouterr().out


def test_unknown_options_print_the_usage_of_their_command(capsys):
    for arguments in (["pack", "--foo", "x"], ["pack", "x", "y"]):
        with pytest.raises(SystemExit) as e:
            main(arguments)
        assert e.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("usage: codec pack [-h]")
        assert err.endswith(
            f"codec pack: error: unrecognized arguments: {arguments[-1] if 'y' in arguments else '--foo'}\n"
        )
    with pytest.raises(SystemExit):
        main(["--foo"])
    assert capsys.readouterr().err.startswith("usage: codec [-h]")


def test_links_without_a_unit_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", w=np.ones((10, 10), np.float32))
    assert main(["advise", str(tmp_path / "x.npz"), "--link", "100"]) == 1
    assert "--link 100 is 100 bits per second: write a unit, such as 100mbit" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones(3))
    old = types.SimpleNamespace(SUPPORTED_SHELLS=["bash"], __version__="1.7")
    monkeypatch.setitem(sys.modules, "shtab", old)
    assert main(["completion", "fish"]) == 1
    assert "shtab 1.7 does not support fish: pip install -U shtab" in capsys.readouterr().err
    for name in ("shtab", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err
    assert main(["bench", str(tmp_path / "x.npy"), "--plot", str(tmp_path / "p.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_doctor_tells_why_an_engine_is_missing(capsys):
    assert main(["doctor", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries["codec"] == codec.__version__
    assert entries["instruction sets"].split(", ") == list(isas())
    for name, why_not in codec.engines().items():
        assert entries[f"engine {name}"] == ("available" if why_not is None else f"not available: {why_not}")


def test_doctor_tells_how_connections_are_protected_and_not_the_secret(monkeypatch, capsys):
    def connections():
        assert main(["doctor", "--json"]) == 0
        out = capsys.readouterr().out
        assert "0123456789" not in out
        return json.loads(out)["connections"]

    for name in [name for name in os.environ if name.startswith(("CODEC_SECRET", "CODEC_TLS", "GLOO_DEVICE"))]:
        monkeypatch.delenv(name)
    assert connections() == "not encrypted, not authenticated"
    monkeypatch.setenv("CODEC_TLS", "psk")
    assert connections().startswith("not possible: tls needs a secret (CODEC_SECRET_FILE), or contexts")
    monkeypatch.setenv("CODEC_SECRET", "0123456789")
    assert connections().startswith("not possible: CODEC_SECRET must have 16")
    monkeypatch.setenv("CODEC_SECRET", "0123456789" * 2)
    assert connections() == "encrypted, authenticated"
    monkeypatch.delenv("CODEC_TLS")
    assert connections() == "not encrypted, authenticated"
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    assert "encrypts the connections of Gloo, but not those of codec: set CODEC_TLS_CERT," in connections()


def test_bench_measures_presets_and_installed_compressors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program.bench, "_SECONDS", 0)
    np.savez(tmp_path / "x.npz", w=np.random.default_rng(0).standard_normal((50, 100)).astype(np.float32), n=np.int8(3))
    assert main(["bench", str(tmp_path / "x.npz"), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {"codec pack", "lossless", "balanced", "small", "smallest", "zstd -3", "zstd -19"} <= set(rows)
    assert 0.8 < rows["codec pack"]["ratio"] < 0.95
    assert rows["lossless"]["error"] == 0 < rows["balanced"]["error"] < rows["small"]["error"]
    np.savez(tmp_path / "none.npz")
    assert main(["bench", str(tmp_path / "none.npz")]) == 1
    assert "no tensor with values" in capsys.readouterr().err


def test_updates_are_recognized_without_reading_pipes(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert not updates.is_update(str(tmp_path / "fifo"))
    assert not updates.is_update(str(tmp_path / "none"))


def test_plots_are_written_as_other_outputs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program.bench, "_SECONDS", 0)
    np.savez(tmp_path / "x.npz", w=np.ones((10, 10), np.float32))
    (tmp_path / "x.npz").chmod(0o600)
    for name, code in (("p.png", 0), ("p.foo", 1), ("-", 1), ("folder/p.png", 1)):
        path = name if name == "-" else str(tmp_path / name)
        assert main(["bench", str(tmp_path / "x.npz"), "--plot", path]) == code
    assert capsys.readouterr().err.count("codec: ") == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.png", "x.npz"]
    assert (tmp_path / "p.png").stat().st_mode & 0o777 == 0o600
