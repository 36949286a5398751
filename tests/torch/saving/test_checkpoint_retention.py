"""Deletion of old checkpoints never breaks a chain: not by an interruption, an unreadable list or a wrong clock."""

import logging
import os
import shutil

import pytest

import codec.torch
from codec.checkpoints.retention import delete_old
from support.checkpoints import check, save, series

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_deletion_keeps_bases_that_are_needed(keep, tmp_path):
    writer = codec.torch.checkpoint_writer(tmp_path, full_every=3, keep=keep)
    (tmp_path / "notes").mkdir()
    for step in range(8):
        save(writer, tmp_path, step)
        left = {path.name for path in tmp_path.iterdir()} - {"notes"}
        newest = range(max(0, step - keep + 1), step + 1)
        assert left == {str(k) for n in newest for k in range(n - n % 3, n + 1)}
        for name in left:
            check(tmp_path, int(name))
    assert (tmp_path / "notes").exists()


def test_interrupted_deletion_breaks_no_chain(tmp_path, monkeypatch):
    series(tmp_path, 6)
    removed, rename = [], os.rename

    def interrupted(old, new):
        if len(removed) == 2:
            raise KeyboardInterrupt
        rename(old, new)
        removed.append(old)

    monkeypatch.setattr(os, "rename", interrupted)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        delete_old(tmp_path / "5", 1)
    monkeypatch.undo()
    for step in (0, 3, 4, 5):
        check(tmp_path, step)
    assert delete_old(tmp_path / "5", 1) == [tmp_path / "0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5"]


def test_checkpoint_that_was_just_saved_is_kept_if_the_clock_was_set_back(tmp_path, monkeypatch):
    writer = codec.torch.checkpoint_writer(tmp_path, keep=1)
    save(writer, tmp_path, 0)
    monkeypatch.setattr("time.time_ns", lambda: 1)
    for step, each in ((1, writer), (2, codec.torch.checkpoint_writer(tmp_path, keep=1))):
        save(each, tmp_path, step)
        assert [path.name for path in tmp_path.iterdir()] == [str(step)]


def test_nothing_is_deleted_while_a_base_is_not_known(tmp_path, caplog):
    series(tmp_path, 6)
    path = tmp_path / "4" / "codec.index"
    text = path.read_bytes()
    path.write_bytes(b"{" + text)
    with pytest.raises(codec.StateError, match=r"4/codec\.index is damaged"):
        delete_old(tmp_path / "5", 1)
    writer = codec.torch.checkpoint_writer(tmp_path, keep=1)
    with caplog.at_level(logging.WARNING, "codec.torch"):
        save(writer, tmp_path, 6)
    assert "no old checkpoint is deleted" in caplog.text
    path.write_bytes(text)
    for step in range(7):
        check(tmp_path, step)
