"""Damaged and crafted checkpoints of changes: loading them is an error, never a crash or other values."""

import json
import os
import shutil

import pytest
import torch

import codec.torch
from codec.checkpoints.chain import Checkpoint
from support.checkpoints import failure, save, series

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("where", ["list", "item"])
def test_damage_is_an_error_that_names_the_checkpoint(where, tmp_path):
    series(tmp_path, 2)
    path = tmp_path / "0" / "codec.index" if where == "list" else next((tmp_path / "0").glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert str(tmp_path / "0") in failure(tmp_path / "1")


def test_items_swapped_between_checkpoints_are_an_error(tmp_path):
    """All frames are whole, but the values are those of another step."""
    for name in "ab":
        writer = codec.torch.checkpoint_writer(tmp_path, full_every=2)
        for step in (0, 1):
            save(writer, tmp_path / name, step, {"w": torch.arange(9000.0) + (step and ord(name) * 1e-3)})
    (tmp_path / "a" / "1" / "__0_0.distcp").write_bytes((tmp_path / "b" / "1" / "__0_0.distcp").read_bytes())
    lines = [(tmp_path / name / "1" / ".metadata").read_bytes() for name in "ba"]
    (tmp_path / "a" / "1" / ".metadata").write_bytes(lines[0])
    assert "do not have the digest" in failure(tmp_path / "a" / "1", {"w": torch.zeros(9000)})


def edited(folder, **changes):
    """Change fields in the first line of a list of items."""
    path = folder / "codec.index"
    lines = path.read_bytes().split(b"\n")
    lines[0] = json.dumps(json.loads(lines[0]) | changes).encode()
    path.write_bytes(b"\n".join(lines))


HEADS = {
    "other format": {"format": 2}, "no digest": {"digest": 3}, "other digest": {"digest": "00"},
    "negative depth": {"depth": -1}, "no base": {"base": None}, "large depth": {"depth": 10**9},
    "base without path": {"base": {"digest": ""}}, "NUL in a path": {"base": {"digest": "", "path": "a\0"}},
    "many items": {"items": 10**18}, "empty path": {"base": {"digest": "", "path": ""}},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_hostile_first_lines_are_errors(name, tmp_path):
    series(tmp_path, 2)
    edited(tmp_path / "1", **HEADS[name])
    assert "damaged" in failure(tmp_path / "1")


ROWS = {
    "file outside": lambda row: [*row[:2], "../0/__0_0.distcp", *row[3:]],
    "file of another kind": lambda row: [*row[:2], "..", *row[3:]],
    "negative begin": lambda row: [*row[:3], -1, *row[4:]],
    "text as size": lambda row: [*row[:5], "1", *row[6:]],
    "deep list": lambda row: "[" * 100_000,
    "no row": lambda row: "",
    "not JSON": lambda row: "{",
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_hostile_rows_are_errors(name, tmp_path):
    series(tmp_path, 2)
    path = tmp_path / "0" / "codec.index"
    lines = path.read_text().split("\n")
    row = ROWS[name](json.loads(lines[1]))
    lines[1] = row if isinstance(row, str) else json.dumps(row)
    path.write_text("\n".join(lines))
    assert "damaged" in failure(tmp_path / "1")


def test_checkpoint_that_names_itself_as_its_base_is_an_error(tmp_path):
    series(tmp_path, 2)
    head = Checkpoint(tmp_path / "1").head
    shutil.rmtree(tmp_path / "0")
    edited(tmp_path / "1", base={"digest": head.digest, "path": "."})
    assert "needs its base" in failure(tmp_path / "1")


@pytest.mark.parametrize("step", "01")
def test_list_that_is_a_pipe_is_an_error(step, tmp_path):
    series(tmp_path, 2)
    path = tmp_path / step / "codec.index"
    path.unlink()
    os.mkfifo(path)
    assert {"0": "is missing", "1": "not a regular file"}[step] in failure(tmp_path / "1")


def test_file_that_is_too_short_is_an_error(tmp_path):
    series(tmp_path, 2)
    path = next((tmp_path / "0").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:1000])
    assert "too short" in failure(tmp_path / "1")
    path.unlink()
    path.mkdir()
    assert "not a regular file" in failure(tmp_path / "1")
