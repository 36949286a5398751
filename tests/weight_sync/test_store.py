"""Updates over a folder, a bucket, HTTP, a TCP connection and torch.distributed: chains, late joiners and failures."""

import os
import re
import socket
import threading
from pathlib import Path

import fsspec
import pytest

import codec
from codec.stores.bucket import ObjectStore
from codec.weight_sync import Publisher, UpdateStore, pull, serve
from codec.weight_sync.store.source import read_head
from support.weight_updates import equal, published, stepped, weights


@pytest.fixture(params=["folder", "http", "bucket"])
def publisher(request, tmp_path):
    host = "127.0.0.1" if request.param == "http" else None
    folder = f"memory://{tmp_path}" if request.param == "bucket" else tmp_path / "store"
    with Publisher(folder, host=host, snapshot_every=3) as publisher:
        yield publisher
    if request.param == "bucket":
        fsspec.filesystem("memory").rm(str(tmp_path), recursive=True)


def test_receivers_of_any_age_reach_the_last_version(publisher):
    early = codec.WeightReceiver()
    assert pull(early, publisher.source) is None
    publisher.publish(weights())
    assert pull(early, publisher.source) == 0
    all_weights = [weights()]
    for k in range(1, 9):
        all_weights.append(stepped(all_weights[-1], k))
        publisher.publish(all_weights[-1])
        if k == 7:
            assert pull(early, publisher.source) == 7
    late, steps = codec.WeightReceiver(), []
    assert pull(late, publisher.source, progress=steps.append) == 8
    assert [(u.version, u.base) for u in steps] == [(6, None), (7, 6), (8, 7)]
    assert pull(early, publisher.source) == 8
    for receiver in (early, late):
        assert equal(all_weights[8], receiver.tensors())
        assert pull(receiver, publisher.source) == 8


@pytest.mark.parametrize("event", ["deleted", "new run"])
def test_receiver_reads_the_list_again_if_its_files_are_gone(publisher, event):
    """While a slow receiver applies a chain, the trainer publishes snapshots, or a new trainer begins."""
    published(publisher, 3)
    receiver, steps, new = codec.WeightReceiver(), [], stepped(weights(), 9)

    def publish(update):
        steps.append(update.version)
        if len(steps) > 1:
            return
        if event == "deleted":
            for _ in range(9):
                publisher.publish(new)
        else:
            with Publisher(publisher._store.source) as other:
                other.publish(new)

    version = pull(receiver, publisher.source, progress=publish)
    assert version == (11 if event == "deleted" else 3)
    assert equal(new, receiver.tensors())


def _names(source):
    """Return the names of the files of a store."""
    return ObjectStore(source).names() if "://" in source else os.listdir(source)


def test_old_files_are_deleted(publisher):
    published(publisher, 9)
    found = _names(publisher._store.source)
    assert sorted(re.sub(r"^0+(\d+)(-\w+-\w+)?(?=\.)", r"\1", name) for name in found if "." in name) == [
        *("3.snapshot", "4.update", "5.update", "6.snapshot", "6.update", "7.update", "8.update"),
    ]
    lists = [name for name in found if name.startswith("head")]
    assert lists == ["head"] or [int(name.removeprefix("head-")) for name in sorted(lists)] == [8, 9, 10, 11]
    if len(lists) > 1:
        assert list(publisher._store.folder.iterdir()) == []  # uploaded files are not kept
    too_old = codec.WeightReceiver(weights())
    assert pull(too_old, publisher.source) == 8  # its version is too old for updates: it receives a snapshot


def test_staged_update_is_found_only_after_commit(publisher):
    receiver = codec.WeightReceiver()
    published(publisher, 1)
    update = publisher.stage(stepped(weights(), 1))
    assert pull(receiver, publisher.source) == 0
    publisher.abandon()
    with pytest.raises(codec.StateError, match="no update is staged"):
        publisher.commit()
    new = stepped(weights(), 2)
    assert publisher.publish(new) == update.version + 1
    assert pull(receiver, publisher.source) == 2
    assert equal(new, receiver.tensors())


def test_receiver_that_applied_an_abandoned_update_needs_a_snapshot(publisher):
    published(publisher, 1)
    receiver = codec.WeightReceiver()
    pull(receiver, publisher.source)
    receiver.apply(publisher.stage(stepped(weights(), 1)))
    publisher.abandon()
    new = stepped(weights(), 2)
    publisher.publish(new)
    steps = []
    assert pull(receiver, publisher.source, progress=steps.append) == 2
    assert [u.base for u in steps] == [None, 0]
    assert equal(new, receiver.tensors())


def test_failed_load_is_repeated_by_the_next_pull(publisher):
    all_weights = published(publisher, 2)
    receiver, served = codec.WeightReceiver(), {}
    pull(receiver, publisher.source, load=served.update)
    publisher.publish(stepped(all_weights[1], 2))
    calls = []

    def fail_once(tensors):
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("busy")
        served.update(tensors)

    with pytest.raises(RuntimeError, match="busy"):
        pull(receiver, publisher.source, load=fail_once)
    assert equal(all_weights[1], served)
    assert pull(receiver, publisher.source, load=served.update) == 2
    assert equal(stepped(all_weights[1], 2), served)


@pytest.mark.parametrize("killed", ["staged", "published", "committed"])
def test_trainer_continues_after_it_was_killed(tmp_path, killed):
    """A restarted trainer, with its base in a folder, first applies the updates that the killed process published."""
    receiver = codec.WeightReceiver()
    first = Publisher(tmp_path / "store", base=tmp_path / "base")
    all_weights = published(first, 3)
    pull(receiver, first.source)
    update = first.stage(stepped(all_weights[2], 3))
    if killed == "published":
        first._store.publish(update)
    elif killed == "committed":
        first.commit()
    first._sender.close()
    with Publisher(tmp_path / "store", base=tmp_path / "base") as second:
        new = stepped(all_weights[2], 4)
        version = second.publish(new)
        assert version == (3 if killed == "staged" else 4)
        assert pull(receiver, second.source) == version
    assert equal(new, receiver.tensors())


def test_files_that_a_killed_trainer_was_writing_are_deleted(tmp_path):
    (tmp_path / ".00000000000000000003.update.77.tmp").write_bytes(b"x")
    (tmp_path / ".head.77.tmp").write_bytes(b"x")
    UpdateStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("place", ["diff", "put", "head", "commit", "delete"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_publisher_goes_on_after_a_failure_at_any_place(publisher, place, error, monkeypatch):
    """The next publication works, in the same process, and receivers of any age get its weights."""
    all_weights = published(publisher, 3)
    early, late = codec.WeightReceiver(), codec.WeightReceiver()
    pull(early, publisher.source)
    target, name = {
        "diff": (publisher._sender, "diff"), "put": (publisher._store, "put"),
        "head": (publisher._store._files, "publish"), "commit": (publisher._sender, "commit"),
        "delete": (publisher._store._files, "delete"),
    }[place]  # fmt: skip

    def fail(*args, **how):
        raise error

    monkeypatch.setattr(target, name, fail)
    with pytest.raises((OSError, KeyboardInterrupt, codec.ArgumentError)):
        publisher.publish(stepped(all_weights[2], 3))
    monkeypatch.undo()
    new = stepped(all_weights[2], 4)
    version = publisher.publish(new)
    for receiver in (early, late):
        assert pull(receiver, publisher.source) == version
        assert equal(new, receiver.tensors())


def test_failed_commit_can_be_repeated_or_is_completed(publisher, monkeypatch):
    all_weights = published(publisher, 1)
    for repeat in (True, False):
        publisher.stage(stepped(all_weights[0], 1))
        monkeypatch.setattr(publisher._sender, "commit", lambda version: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publisher.commit()
        monkeypatch.undo()
        before = publisher.version
        if repeat:
            assert publisher.commit() == before
        else:
            publisher.abandon()  # too late: receivers can see the update
            publisher.stage(all_weights[0])
        assert publisher._sender.version == before


def test_store_that_is_not_there_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "head")
    receiver = codec.WeightReceiver()
    for source, message in (
        (tmp_path / "no", "is not a store of updates"),
        (tmp_path / "file", "is not a store of updates"),
        (tmp_path, "not a regular file"),
        ("ftp://host/updates", "'ftp' is not known"),
        ("memory://no-store", "is not a store of updates"),
        (f"file://{tmp_path}/no", "is not a store of updates"),
        ("file://updates", "three slashes"),
        (Path("s3://bucket/updates"), "pass a str, not a Path"),
        ("http://", "not the URL of a store"),
        ("http://127.0.0.1:1/x?y", "must not hold"),
        ("http://[", "cannot be read"),
        ("http://127.0.0.1:x", "cannot be read"),
        ("HTTP://127.0.0.1:1", "refused"),
    ):
        with pytest.raises(codec.ArgumentError, match=message):
            pull(receiver, source)
    for timeout in (0, -1, float("nan"), float("inf"), "3", None):
        with pytest.raises(codec.ArgumentError, match="timeout must be"):
            pull(receiver, tmp_path, timeout=timeout)
    with serve(tmp_path / "no") as server, pytest.raises(codec.ArgumentError, match="is not a store of updates"):
        pull(receiver, server.url)
    UpdateStore(tmp_path / "empty")
    assert pull(receiver, tmp_path / "empty") is None


def test_store_deletes_only_files_with_names_of_its_own(tmp_path):
    others = {"0.pt", "1.safetensors", "2.json", ".download.tmp", ".0.pt.1.tmp", f"{0:020d}.update.bak"}
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / f"{0:020d}.update").mkdir()
    with Publisher(tmp_path, snapshot_every=1) as publisher:
        published(publisher, 6)
    UpdateStore(tmp_path).clear()
    assert {p.name for p in tmp_path.iterdir()} == others | {"head", f"{0:020d}.update"}


def test_damaged_file_of_an_update_is_written_again(tmp_path):
    store, sender = UpdateStore(tmp_path), codec.WeightSender(weights())
    update = codec.Update(bytes(sender.snapshot().data))
    for damage in (b"", b"x", bytes(update.data)[:-1], bytes(update.data)[:-1] + b"?"):
        store.path(0, None).write_bytes(damage)
        store.put(update)
        assert store.path(0, None).read_bytes() == update.data


def test_trainer_without_a_base_begins_with_a_snapshot(tmp_path):
    with Publisher(tmp_path) as first:
        published(first, 2)
        receiver = codec.WeightReceiver()
        pull(receiver, first.source)
    with Publisher(tmp_path) as second:
        assert second.publish(stepped(weights(), 9)) == 2
        assert pull(receiver, second.source) == 2


def test_store_rejects_updates_that_do_not_follow(tmp_path):
    store = UpdateStore(tmp_path)
    sender = codec.WeightSender(weights())
    update = sender.diff(stepped(weights(), 1))
    with pytest.raises(codec.StateError, match=r"needs version 0 as its base, but the last version in .* is None"):
        store.publish(update)
    store.publish(sender.snapshot())
    store.publish(update)
    store.publish(update)  # changes nothing
    assert len(read_head(tmp_path).updates) == 2
    other = sender.diff(stepped(weights(), 2))
    with pytest.raises(codec.StateError, match=r"needs version 0 as its base, but the last version in .* is 1"):
        store.publish(other)
    with pytest.raises(codec.StateError, match="snapshot has version 0"):
        store.publish(sender.snapshot())
    stranger = codec.WeightSender(stepped(weights(), 3), version=1).diff(weights())
    with pytest.raises(codec.StateError, match=r"needs version 1 .* is 1 of other weights"):
        store.publish(stranger)


def test_updates_over_a_connection_of_the_caller():
    sender, receiver = codec.WeightSender(weights()), codec.WeightReceiver(weights())
    new = stepped(weights(), 1)
    here, there = socket.socketpair()
    with here, there:
        update = sender.diff(new)

        def send():
            here.sendall(update.nbytes.to_bytes(8, "little") + update.data)
            here.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        with there.makefile("rb") as f:
            received = f.read(int.from_bytes(f.read(8), "little"))
        thread.join()
    receiver.apply(received)
    assert equal(new, receiver.tensors())


def broadcast_update(rank, size):
    """Send an update from rank 0 by torch.distributed; return the digest of each rank."""
    import torch
    import torch.distributed as dist

    receiver = codec.WeightReceiver(weights())
    data = torch.empty(0, dtype=torch.uint8)
    if rank == 0:
        sender = codec.WeightSender(weights())
        data = torch.frombuffer(bytearray(sender.diff(stepped(weights(), 1)).data), dtype=torch.uint8)
    n = torch.tensor(len(data))
    dist.broadcast(n, 0)
    data = data if rank == 0 else torch.empty(int(n), dtype=torch.uint8)
    dist.broadcast(data, 0)
    receiver.apply(data)
    return receiver.digest.hex()


@pytest.mark.nightly
def test_updates_over_torch_distributed():
    from support.ranks import run_ranks

    expected = codec.WeightReceiver(stepped(weights(), 1)).digest.hex()
    assert run_ranks(2, broadcast_update) == [expected] * 2


def test_wrong_arguments_are_rejected(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(codec.ArgumentError, match="cannot be used"):
        UpdateStore(tmp_path / "file")
    with pytest.raises(codec.ArgumentError, match="keep must be an int"):
        UpdateStore(tmp_path, keep=0)
    with pytest.raises(codec.ArgumentError, match="cannot be read"):
        codec.Update.open(tmp_path / "missing")
    with pytest.raises(codec.FrameError, match="truncated"):
        codec.Update.open(tmp_path / "file")
    with pytest.raises(codec.ArgumentError, match="not a regular file"):
        codec.Update.open("/dev/zero")


def test_publisher_leaves_files_numbered_by_other_digits(tmp_path):
    """The name of the file of version 1, with Arabic digits."""
    foreign = tmp_path / ("\u0660" * 19 + "\u0661.update")
    foreign.write_bytes(b"of another program")
    with Publisher(tmp_path) as publisher:
        publisher.publish(weights())
    assert foreign.read_bytes() == b"of another program"
