"""codec.advise returns and prints what it has chosen, in Python, as a table and as JSON."""

import dataclasses
import json
import math
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from codec.__main__ import main
from codec.advisor.advise import Advice
from codec.advisor.cost_model import Cost, LinkModel, link_of
from support.captured import DATA, gradients

NEVER = LinkModel(math.inf)


def test_advice_prints_a_table_and_json(clock):
    """Advice is immutable, and prints as a table and as JSON, in which a spec is its constructor call."""
    advice = codec.advise(gradients("cnn_float32"), LinkModel(1e8, 1e-3), lossy=True, feedback=True)
    assert isinstance(advice, Advice)
    with pytest.raises(dataclasses.FrozenInstanceError):
        advice.spec = None
    lines = str(advice).splitlines()
    assert lines[0] == "two_shot all-reduce of 0.584 MB, 4 ranks, 100 Mbit/s, round trip 1 ms"
    assert lines[-2] == advice.why
    assert lines[-1] == (
        "For DistributedDataParallel: hook = codec.torch.ddp_hook("
        "codec.Sign(scale='l1', group_size=1024), feedback=True).register(model)"
    )
    assert [line[2:].split()[0] for line in lines[2:-2]] == [
        "raw",
        "Lossless()",
        "Float8()",
        "Quantize(bits=8)",
        "Quantize()",
        "Ternary(packing='base3')",
        "Sign(group_size=1024)",
    ]
    assert [line[0] for line in lines[2:-2]] == [" "] * 6 + [">"]
    parsed = json.loads(advice.to_json())
    assert parsed == advice.to_dict()
    assert parsed["link"] == {"bits_per_second": 1e8, "rtt": 1e-3}
    for row, real in zip(parsed["table"], advice.table, strict=True):
        spec = row["spec"] and eval(row["spec"], vars(codec))
        assert (spec, row["seconds"], Cost(**row["cost"])) == (real.spec, real.seconds, real.cost)
    endless = json.loads(codec.advise(np.ones(9, np.float32), NEVER).to_json(), parse_constant=pytest.fail)
    assert endless["link"]["bits_per_second"] is None


def test_command_prints_json_alone_on_stdout():
    """`codec advise --json` prints only JSON to stdout; progress goes to stderr."""
    command = [sys.executable, "-P", "-m", "codec", "advise", str(DATA / "transformer_bfloat16.npz"), "grad_bits"]
    how = ["--dtype", "bfloat16", "--link", "1mbit", "--ranks", "2", "--json"]
    done = subprocess.run([*command, *how], capture_output=True, text=True, check=True)
    parsed = json.loads(done.stdout)
    assert (parsed["spec"], parsed["world_size"], parsed["tensor_nbytes"]) == ("Lossless()", 2, 463_104)
    assert "measuring grad_bits" in done.stderr


def test_command_prints_a_table(clock, tmp_path, capsys):
    """The command skips arrays that are not floats, unless they are named; an error is one line."""
    path = str(tmp_path / "x.npz")
    x = gradients("cnn_float32")
    np.savez(path, step=np.int64(3), lr=np.float64(1e-3), a=x[0], b=x[1])
    assert main(["advise", path, "--link", "1mbit", "--lossy", "--feedback", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert "> Sign(group_size=1024)" in out
    assert "measuring a, b" in err
    np.save(tmp_path / "x.npy", x[0])
    (tmp_path / "not.npz").write_bytes(b"PK\x03\x04 but no more")
    (tmp_path / "bare.npz").write_bytes(b"")
    for arguments, words in (
        ([path, "--link", "fast"], "link must be"),
        ([path, "step", "--link", "1mbit"], "'step': frames of int64 cannot be reduced"),
        ([path, "c", "--link", "1mbit"], "has no array c: its arrays are step, lr, a, b"),
        ([str(tmp_path / "none.npz"), "--link", "1mbit"], "cannot be read"),
        ([str(tmp_path / "not.npz"), "--link", "1mbit"], "cannot be read"),
        ([str(tmp_path / "bare.npz"), "--link", "1mbit"], "cannot be read"),
        ([str(tmp_path / "x.npy"), "y", "--link", "1mbit"], "has no array y: its arrays are x"),
    ):
        assert main(["advise", *arguments]) == 1
        out, err = capsys.readouterr()
        assert words in err
        assert not out


def test_command_names_machines_and_their_ranks(clock, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((100, 1000)).astype(np.float32))
    command = ["advise", str(tmp_path / "x.npy"), "--link", "1mbit", "--lossy"]
    assert main([*command, "--ranks", "2x8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_gather all-reduce of 0.4 MB, 2 x 8 ranks, 1 Mbit/s, round trip 0.2 ms"
    assert lines[-2].startswith("In two levels: ")
    before, hook = lines[-1].removeprefix("For DistributedDataParallel: ").split("; ")
    assert before == 'mesh = torch.distributed.init_device_mesh("cpu", (2, 8))'
    assert hook.endswith("feedback=False).register(model, group=mesh)")
    assert main([*command, "--ranks", "2x8", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["table"][-1]
    assert row["seconds"] == row["seconds_by_levels"][1] < row["seconds_by_levels"][0]
    with pytest.raises(SystemExit):
        main([*command, "--ranks", "2y8"])
    assert "'2y8' is neither a number of ranks nor machines x ranks" in capsys.readouterr().err


def test_links_parse_units_and_powers_of_ten():
    """Link speeds accept bit units with powers of ten, and reject "B" for bytes."""
    for text, rate in (
        ("1e9", 1e9), ("100", 100), ("1Gbps", 1e9), ("1 Gbps", 1e9), ("1.5e3 kbit", 1.5e6), ("10gbit", 1e10),
        ("100Mbit/s", 1e8), ("100 Mbits/s", 1e8), (" .5Mbps ", 5e5),
    ):  # fmt: skip
        assert link_of(text).bits_per_second == rate
    for text in ("1GBps", "5bps", "1 GB/s", "fast", "", "1e", "-1", "1 2", "1Gbps2", "nan", "0x1"):
        with pytest.raises(codec.ArgumentError, match="link must be"):
            link_of(text)


def test_command_reinterprets_arrays_with_dtype(clock, tmp_path, capsys):
    """--dtype reinterprets arrays of the same item size, also those that numpy saves for ml_dtypes."""
    path = str(tmp_path / "x.npz")
    x = gradients("cnn_float32")[0].astype(ml_dtypes.bfloat16)
    np.savez(
        path, saved=x, bits=x.view(np.uint16), signed=x.view(np.int16), wide=x.astype(np.float32), one=np.uint16(1)
    )
    for names in ([], ["saved", "bits"], ["saved"]):
        assert main(["advise", path, *names, "--link", "1e6", "--dtype", "bfloat16"]) == 0
        assert f"measuring {', '.join(names or ['saved', 'bits'])}:" in capsys.readouterr().err
    assert main(["advise", path, "--link", "1e6", "--dtype", "float31"]) == 1
    assert "float31 cannot be encoded" in capsys.readouterr().err


def test_json_has_null_for_infinity():
    """The JSON of an advice names the algorithm, and represents infinite numbers as null."""
    for rate in (1e-323, 1e9, float("inf")):
        for algorithm in ("ring", "two_shot"):
            advice = codec.advise(
                np.ones(1000, np.float32), LinkModel(rate), options=codec.options(algorithm=algorithm)
            )
            parsed = json.loads(advice.to_json(), parse_constant=pytest.fail)
            assert parsed == advice.to_dict()
            assert parsed["algorithm"] == advice.algorithm == algorithm
            assert str(advice).startswith(f"{algorithm} all-reduce of")


@pytest.mark.parametrize("feedback", [False, True])
def test_printed_ddp_hook_call_is_valid_python(feedback):
    """The ddp_hook call in an advice is valid Python for every codec that advise can choose."""
    import codec.torch

    p = torch.nn.Parameter(torch.randn(5000))
    p.grad = torch.randn(5000) * 1e-3
    optimizer = torch.optim.SGD([p], lr=0.1)
    for spec in (codec.Lossless(), codec.Float8(), codec.Quantize(4), codec.Sign(group_size=1024), codec.Truncate()):
        how = {"candidates": [spec], "feedback": feedback, "optimizer": optimizer}
        advice = codec.advise([p.grad], "1kbit", **how)
        call = advice.hook.removeprefix("hook = ").removesuffix(".register(model)")
        hook = eval(call, {"codec": codec, "optimizer": optimizer})
        assert hook.spec == spec
    assert codec.advise([p.grad], LinkModel(float("inf"))).hook is None


def test_members_that_are_no_arrays_are_left_out(tmp_path, capsys):
    """Members of a zip file that are not arrays are skipped; without arrays, or if such a member is named, one line of
    error lists the contents.
    """
    np.savez(path := tmp_path / "gradients.npz", weight=np.ones((50, 60), np.float32))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("README.txt", "hello")
        archive.writestr("notes.npy", "hello")
    assert main(["advise", str(path), "--link", "1gbit", "--rtt", "40ms"]) == 0
    printed = capsys.readouterr()
    warned = f"codec: {path}: left out, because they are not arrays: README.txt, notes.npy\n"
    assert "4 ranks, 1 Gbit/s, round trip 40 ms" in printed.out
    assert printed.err.startswith(warned)
    assert main(["advise", str(path), "notes", "--link", "1gbit"]) == 1
    assert capsys.readouterr().err == f"{warned}codec: {path} has no array notes: its arrays are weight\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("README.txt", "hello")
    assert main(["advise", str(path), "--link", "1gbit"]) == 1
    assert "(its arrays: none)" in capsys.readouterr().err
