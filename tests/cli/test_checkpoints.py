"""codec ls, verify and compose on folders of checkpoints that store changes."""

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

import codec.torch
from support.command import run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHT = torch.randn(50_000, generator=torch.Generator().manual_seed(0))


def state_of(step):
    weight = WEIGHT.clone()
    weight[: 100 * step] += 1
    return {"weight": weight, "bias": WEIGHT[:7].clone(), "object": {"step": step}}


@pytest.fixture
def folders(tmp_path):
    writer = codec.torch.checkpoint_writer(tmp_path, full_every=3)
    for step in range(4):
        dcp.save(state_of(step), checkpoint_id=tmp_path / str(step), storage_writer=writer, no_dist=True)
    return tmp_path


def check(folder, step):
    state = {"weight": torch.zeros(50_000), "bias": torch.zeros(7), "object": {"step": -1}}
    dcp.load(state, storage_reader=codec.torch.checkpoint_reader(folder), no_dist=True)
    assert torch.equal(state["weight"], state_of(step)["weight"])
    assert torch.equal(state["bias"], WEIGHT[:7])
    assert state["object"] == {"step": step}


def failed(capsys, *arguments):
    """Run a command that fails with exit code 1, and return its line on stderr."""
    assert run(*arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_ls_shows_base_and_sizes(folders, capsys):
    assert run("ls", folders / "2") == 0
    out = capsys.readouterr().out
    assert "changes of ../1, digest " in out
    assert "2 bases in all" in out
    assert "changes" in next(line for line in out.splitlines() if line.startswith("weight "))
    assert run("ls", folders / "2", "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries["depth"] == 2
    assert sum(item["stored_nbytes"] for item in entries["items"]) < 0.1 * WEIGHT.nbytes
    assert run("ls", folders / "3") == 0
    out = capsys.readouterr().out
    assert "a full checkpoint" in out
    assert "frames" in next(line for line in out.splitlines() if line.startswith("weight "))


def test_verify_walks_the_chain(folders, capsys):
    assert run("verify", folders / "2", folders / "0") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("2: a whole checkpoint of 3 items, with the bases 1, 0")
    assert second.endswith("0: a whole checkpoint of 3 items")
    path = folders / "0" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert str(folders / "0") in failed(capsys, "verify", folders / "2")
    shutil.rmtree(folders / "0")
    assert f"needs its base {folders / '0'}" in failed(capsys, "verify", folders / "2")


def test_compose_writes_a_full_checkpoint_that_can_replace_the_original(folders, capsys):
    assert run("compose", folders / "1", "-o", folders / "full") == 0
    assert "full: a full checkpoint of 3 items, " in capsys.readouterr().out
    for name in "01":
        shutil.rmtree(folders / name)
    check(folders / "full", 1)
    check(folders / "2", 2)
    assert run("ls", folders / "full") == 0
    assert "a full checkpoint" in capsys.readouterr().out


def test_compose_leaves_nothing_after_an_error(folders, capsys):
    assert "exists already" in failed(capsys, "compose", folders / "2", "-o", folders / "3")
    shutil.rmtree(folders / "0")
    assert "needs its base" in failed(capsys, "compose", folders / "2", "-o", folders / "full")
    assert "no complete checkpoint" in failed(capsys, "compose", folders, "-o", folders / "full")
    assert sorted(path.name for path in folders.iterdir()) == ["1", "2", "3"]


class Hostile:
    """Object whose pickle creates a file."""

    def __reduce__(self):
        return open, ("hostile", "w")


def test_compose_runs_no_code_of_a_checkpoint(folders, capsys, monkeypatch):
    monkeypatch.chdir(folders)
    (folders / "2" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    assert "must not contain" in failed(capsys, "compose", folders / "2", "-o", folders / "full")
    (folders / "2" / ".metadata").write_bytes(b"\x80\x05damaged")
    assert "damaged" in failed(capsys, "compose", folders / "2", "-o", folders / "full")
    assert not (folders / "hostile").exists()
