"""Updates over a folder, HTTP, a TCP connection and torch.distributed: chains, late joiners and failures."""

import json
import socket
import threading
import urllib.error
import urllib.request

import pytest

import codec
from codec.weight_sync import Publisher, UpdateStore, pull, serve
from codec.weight_sync.store import Listed, chain, read_head
from support.weight_updates import equal, stepped, weights


@pytest.fixture(params=["folder", "http"])
def publisher(request, tmp_path):
    host = "127.0.0.1" if request.param == "http" else None
    with Publisher(tmp_path / "store", host=host, snapshot_every=3) as publisher:
        yield publisher


def published(publisher, count):
    """Publish `count` versions, and return the weights of each."""
    all_weights = [weights()]
    for k in range(1, count):
        all_weights.append(stepped(all_weights[-1], k))
    assert [publisher.publish(w) for w in all_weights] == list(range(count))
    return all_weights


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


def test_old_files_are_deleted(publisher):
    published(publisher, 9)
    folder = publisher._store.folder
    assert sorted(p.name.lstrip("0") for p in folder.glob("*.*")) == [
        *("3.snapshot", "4.update", "5.update", "6.snapshot", "6.update", "7.update", "8.update"),
    ]
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
    with pytest.raises(codec.StateError):
        pull(receiver, publisher.source)
    assert publisher.stage(new, full=True).base is None
    publisher.commit()
    pull(receiver, publisher.source)
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
    UpdateStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


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
    with pytest.raises(codec.StateError, match=r"needs version 0 as its base, but the last version in .* is 1"):
        store.publish(update)
    with pytest.raises(codec.StateError, match="snapshot has version 0"):
        store.publish(sender.snapshot())


def test_chain_never_loops():
    listed = [Listed(5, 3, 1), Listed(3, 5, 1), Listed(9, 8, 1)]
    with pytest.raises(codec.StateError, match="no chain"):
        chain(listed, 3)
    assert chain([], 4) == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "updates": [{"version": -1}]}',
    b'{"format": 1, "updates": [{"version": "../x", "base": null, "nbytes": 1}]}', b"\xff"])  # fmt: skip
def test_damaged_lists_are_rejected(tmp_path, body):
    (tmp_path / "head").write_bytes(body)
    with pytest.raises(codec.FrameError, match="not a list of updates"):
        read_head(tmp_path)


def test_server_offers_updates_only(tmp_path):
    (tmp_path / "secret").write_text("x")
    with serve(tmp_path) as server:
        for path in ("secret", "../secret", "", "head", "%2e%2e/secret", "00000000000000000001.update"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{server.url}/{path}", timeout=30)
        url = server.url
    with pytest.raises(codec.ArgumentError, match="cannot be read"):
        read_head(url, timeout=5)
    with pytest.raises(codec.ArgumentError, match="cannot listen on"):
        serve(tmp_path, "203.0.113.1")


def test_connection_that_is_cut_or_lies_changes_nothing(tmp_path):
    """If a server stops inside a file, or sends more bytes than its list declares, the receiver raises, unchanged."""
    with Publisher(tmp_path) as publisher:
        published(publisher, 1)
    snapshot = (tmp_path / f"{0:020d}.snapshot").read_bytes()
    head = json.dumps({"format": 1, "updates": [{"version": 0, "base": None, "nbytes": len(snapshot)}]}).encode()
    for body, length in (
        (snapshot[:-9], len(snapshot)),
        (snapshot + b"more", len(snapshot) + 4),
        (snapshot[:-9], None),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer(listener=listener, body=body, length=length):
                for content, size in ((head, len(head)), (body, length)):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        line = "" if size is None else f"Content-Length: {size}\r\n"
                        connection.sendall(f"HTTP/1.0 200 OK\r\n{line}\r\n".encode() + content)

            thread = threading.Thread(target=answer)
            thread.start()
            receiver = codec.WeightReceiver()
            with pytest.raises((codec.FrameError, codec.ArgumentError)):
                pull(receiver, f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=10)
            thread.join()
            assert receiver.version is None


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
