"""Weights in a folder survive the process, at whichever point an update was interrupted."""

import os

import numpy as np
import pytest

import codec
from support.processes import run
from support.tiers import NIGHTLY
from support.weight_updates import equal, stepped, versions, weights

# A child process opens the folder and applies an update. It is killed at a given line of the modules that write. The
# parent then opens the folder as the next process would.
KILLED = """
import shutil, tempfile
sys.path.insert(0, {tests!r})
from support.fault_lines import at_line
from support.weight_updates import equal, versions

all_weights, updates = versions(3)
full = bytes(codec.WeightSender(all_weights[1], version=1).diff(all_weights[2], version=2, full=True).data)
root = tempfile.mkdtemp()

def attempt(start, update, version, point):
    folder = f"{{root}}/{{version}}-{{point}}"
    shutil.copytree(start, folder)
    child = os.fork()
    if child == 0:
        with at_line(point, lambda: os.kill(os.getpid(), signal.SIGKILL), "bases/folder.py", "bases/base.py"):
            codec.WeightReceiver(folder=folder).apply(update)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    with codec.WeightReceiver(folder=folder) as receiver:
        found = receiver.version
        assert found in (version - 1, version), (point, found)
        assert equal(all_weights[found], receiver.tensors()), (point, found)
        if found == version - 1:
            receiver.apply(update)
        assert equal(all_weights[version], receiver.tensors()), point
        assert not set(os.listdir(folder)) & {{"pending", "piece"}}, os.listdir(folder)
        assert len(os.listdir(folder)) == 3, os.listdir(folder)
    shutil.rmtree(folder)
    return os.WIFSIGNALED(status), found

codec.WeightReceiver(all_weights[0], folder=root + "/first").close()
codec.WeightReceiver(all_weights[1], version=1, folder=root + "/second").close()
for start, update, version in (("first", updates[0], 1), ("second", full, 2)):
    results = set()
    point = 0
    while (done := attempt(f"{{root}}/{{start}}", update, version, point))[0]:
        results.add(done[1])
        point += {step}
    assert results == {{version - 1, version}}, results
shutil.rmtree(root)
print("the end")
"""


def test_process_killed_at_any_point_leaves_a_committed_version():
    code = KILLED.format(tests=os.path.dirname(os.path.dirname(__file__)), step=1 if NIGHTLY else 11)
    run(code, noise=("<string>:", "  child = os.fork()"), CODEC_NUM_THREADS="1")


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("written", [0.0, 0.3, 1.0])
def test_piece_torn_by_a_kill_is_restored(tmp_path, monkeypatch, written, kept):
    """A piece that was half overwritten when the process was killed is restored from the file ``piece``.

    The file has the changes of the piece if they are kept, otherwise the new piece.
    """
    all_weights, updates = versions(2)
    monkeypatch.setattr("codec.weight_sync.bases.checking._SHARE", 1 if kept else 1 << 40)
    receiver = codec.WeightReceiver(all_weights[0], folder=tmp_path)
    original, calls = receiver._base.write, []

    def torn(out, decode, changes):
        calls.append(None)
        if len(calls) < 4:
            original(out, decode, changes)
            return
        assert (changes is not None) == kept
        copy = out.copy()
        original(copy, decode, changes)
        n = int(len(out) * written)
        out[:n] = copy[:n]
        raise SystemExit

    monkeypatch.setattr(receiver._base, "write", torn)
    with pytest.raises(SystemExit):
        receiver.apply(updates[0])
    receiver._base.close()  # stands for the end of the process
    with codec.WeightReceiver(folder=tmp_path) as restored:
        assert restored.version == 1
        assert equal(all_weights[1], restored.tensors())


def test_folder_keeps_version_and_weights(tmp_path):
    all_weights, updates = versions(3)
    with codec.WeightReceiver(all_weights[0], folder=tmp_path) as receiver:
        receiver.apply(updates[0])
    with codec.WeightReceiver(folder=tmp_path) as receiver:
        assert receiver.version == 1
        assert equal(all_weights[1], receiver.tensors())
        receiver.apply(updates[1])
        with pytest.raises(codec.StateError, match="in use by another"):
            codec.WeightReceiver(folder=tmp_path)
    with codec.WeightReceiver(folder=tmp_path) as receiver:
        assert equal(all_weights[2], receiver.tensors())
    with pytest.raises(codec.StateError, match="holds version 2: leave out weights"):
        codec.WeightReceiver(weights(), folder=tmp_path)


def test_sender_continues_from_its_folder(tmp_path):
    first, second = weights(), stepped(weights(), 1)
    receiver = codec.WeightReceiver(first)
    with codec.WeightSender(first, folder=tmp_path) as sender:
        sender.diff(second)  # begins an update that is never committed
    with codec.WeightSender(folder=tmp_path) as sender:
        assert (sender.version, sender.pending) == (0, None)
        update = sender.diff(second)
        receiver.apply(update)
        sender.commit()
    with codec.WeightSender(folder=tmp_path) as sender:
        assert (sender.version, sender.digest) == (1, receiver.digest)


def test_wrong_folders_are_rejected(tmp_path):
    with pytest.raises(codec.ArgumentError, match="pass weights"):
        codec.WeightSender()
    with pytest.raises(codec.StateError, match="holds no weights"):
        codec.WeightSender(folder=tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(codec.StateError, match="cannot be used"):
        codec.WeightReceiver(folder=tmp_path / "file")


@pytest.mark.parametrize("name", ["state", "values-0"])
def test_damaged_folder_is_rejected(tmp_path, name):
    codec.WeightReceiver(weights(), folder=tmp_path).close()
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(codec.StateError, match=r"[Ss]tart from an empty folder"):
        codec.WeightReceiver(folder=tmp_path)
    path.write_bytes(data[: len(data) // 3])
    with pytest.raises(codec.StateError, match=r"[Ss]tart from an empty folder"):
        codec.WeightReceiver(folder=tmp_path)


def test_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    receiver = codec.WeightReceiver(weights(), folder=tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    other = codec.WeightSender({"x": np.ones(1 << 20, np.float32)}, version=5)
    with pytest.raises(codec.StateError, match="No space left"):
        receiver.apply(other.snapshot())
    assert receiver._base.version == 0
    assert equal(weights(), receiver._base.tensors(weights(), None, None))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(codec.StateError, match="No space left"):
        codec.WeightReceiver(weights(), folder=tmp_path / "other")
    monkeypatch.undo()

    def lost():
        yield from list(weights().items())[:3]
        raise ConnectionResetError("lost rank")

    with pytest.raises(ConnectionResetError, match="lost rank"):
        codec.WeightReceiver(lost(), folder=tmp_path / "other")
    with codec.WeightReceiver(iter(weights().items()), folder=tmp_path / "other") as other:
        assert equal(weights(), other.tensors())
