"""Stores of updates in a bucket: two publishers, late and wrong answers, URLs, and credentials in errors."""

import os
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

import codec
from codec.integrations.peft import AdapterPublisher, AdapterReceiver
from codec.stores import calls
from codec.stores.bucket import ObjectStore
from codec.stores.locations import folder_at, location
from codec.weight_sync import Publisher, UpdateStore, pull, serve
from codec.weight_sync.store.bucket import object_name
from codec.weight_sync.store.source import read_head
from codec.weight_sync.store.staging import StagingFolder
from support.weight_updates import equal, published, stepped, weights


@pytest.fixture
def url(request, monkeypatch):
    """Return the URL of an empty folder in a bucket."""
    url = f"memory://{os.getpid()}/{request.node.name}"
    yield url
    monkeypatch.undo()
    ObjectStore(url).delete(ObjectStore(url).names())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(calls, "_PAUSE", 0.001)


def around(monkeypatch, name, before=lambda *args: None, result=lambda found, *args: found):
    """Run `before` before each call of a method of stores, and replace its result."""
    original = getattr(ObjectStore, name)

    def call(self, *args):
        before(*args)
        return result(original(self, *args), *args)

    monkeypatch.setattr(ObjectStore, name, call)


@pytest.mark.parametrize("count", [1, 9])
def test_publisher_fails_if_another_one_publishes_before_it_writes_the_list(url, count, monkeypatch):
    """After 9 publications of the other one, its first list, which the slow publisher creates again, is deleted."""
    first, second = Publisher(url, snapshot_every=2), Publisher(url, snapshot_every=2)
    all_weights, receiver, calm = published(first, 3), codec.WeightReceiver(), []
    pull(receiver, url)

    def overtake(name, data):
        if name.startswith("head") and not calm:
            calm.append(name)
            for k in range(count):
                second.publish(stepped(all_weights[0], 10 + k))

    around(monkeypatch, "create", overtake)
    with pytest.raises(codec.StateError, match="another publisher has published"):
        first.publish(stepped(all_weights[2], 3))
    with pytest.raises(codec.StateError, match="another publisher has published"):
        first.publish(stepped(all_weights[2], 3))
    for reader in (receiver, codec.WeightReceiver()):
        assert pull(reader, url) == 2 + count
        assert equal(stepped(all_weights[0], 9 + count), reader.tensors())
    second.publish(all_weights[1])
    assert pull(receiver, url) == 3 + count
    third = Publisher(url)
    third.publish(all_weights[2])
    assert pull(receiver, url) == 4 + count
    assert equal(all_weights[2], receiver.tensors())


def test_list_whose_answer_was_lost_is_published(url, monkeypatch):
    publisher, lost = Publisher(url), []

    def lose(created, name, data):
        if not lost and name.startswith("head"):
            lost.append(name)
            raise ConnectionResetError("no answer")
        return created

    around(monkeypatch, "create", result=lose)
    assert publisher.publish(weights()) == 0
    assert lost
    assert pull(codec.WeightReceiver(), url) == 0


@pytest.mark.parametrize("late", ["list", "update"])
@pytest.mark.parametrize("part", [False, True])
def test_objects_that_a_bucket_shows_late_or_in_part_are_waited_for(url, late, part, monkeypatch):
    Publisher(url).publish(weights())
    misses, forever = [], []

    def miss(found, name, begin, end):
        if name.startswith("head") == (late == "list") and (forever or len(misses) < 3):
            misses.append(name)
            return found[:-9] if part else None
        return found

    around(monkeypatch, "read", result=miss)
    receiver = codec.WeightReceiver()
    assert pull(receiver, url) == 0
    assert len(misses) == 3
    forever.append(True)
    cut = part and late == "update"  # an object that stays too short is damaged
    message = "the connection ended after" if cut else "the bucket shows new objects late: try again"
    with pytest.raises(codec.FrameError if cut else codec.ArgumentError, match=message):
        pull(codec.WeightReceiver(), url)


def test_publisher_knows_its_list_before_the_bucket_names_it(url, monkeypatch):
    with Publisher(url) as publisher:
        published(publisher, 2)
        newest = max(name for name in ObjectStore(url).names() if name.startswith("head"))
        around(monkeypatch, "names", result=lambda names: [name for name in names if name != newest])
        assert publisher.publish(stepped(weights(), 5)) == 2
        monkeypatch.undo()
        receiver = codec.WeightReceiver()
        assert pull(receiver, url) == 2
        assert equal(stepped(weights(), 5), receiver.tensors())


@pytest.mark.parametrize("damage", ["truncated", "longer", "another", "one bit"])
def test_receiver_refuses_objects_that_are_not_as_listed(url, damage, monkeypatch):
    monkeypatch.setattr("codec.weight_sync.store.bucket._BLOCK", 1000)
    with Publisher(url) as publisher:
        published(publisher, 2)
    receiver, store = codec.WeightReceiver(), ObjectStore(url)
    [name] = [name for name in store.names() if name.endswith("snapshot")]
    data = store.get(name, 1 << 20)
    changed = bytearray(data)
    changed[-9] ^= 1
    other = bytes(codec.WeightSender(weights()).snapshot().data)
    store.put(name, {"truncated": data[:-1500], "longer": data + b"x", "another": other, "one bit": changed}[damage])
    with pytest.raises(codec.FrameError):
        pull(receiver, url)
    assert receiver.version is None
    store.put(name, data)
    assert pull(receiver, url) == 1


def test_large_updates_are_read_in_blocks(url, monkeypatch):
    reads = []
    monkeypatch.setattr("codec.weight_sync.store.bucket._BLOCK", 4096)
    around(monkeypatch, "read", lambda name, begin, end: reads.append((name, end - begin)))
    with Publisher(url, sign=b"k" * 32) as publisher:
        published(publisher, 1)
    receiver = codec.WeightReceiver(verify=b"k" * 32)
    assert pull(receiver, url) == 0
    assert equal(weights(), receiver.tensors())
    sizes = [n for name, n in reads if name.endswith("snapshot")]
    assert len(sizes) > 3
    assert max(sizes) == 4096
    with pytest.raises(codec.FrameError):
        pull(codec.WeightReceiver(verify=b"K" * 32), url)


@pytest.mark.parametrize("blocks", [1, 2])
def test_no_request_begins_at_the_end_of_an_object(url, blocks, monkeypatch):
    """Object stores answer such a request with different errors."""
    with Publisher(url) as publisher:
        publisher.publish({"w": np.zeros(2000, np.float32), "odd" * blocks: np.zeros(1, np.uint8)})
    [one], store, begins = read_head(url).updates, ObjectStore(url), []
    name, size = object_name(one), one.nbytes // blocks
    assert size * blocks == one.nbytes
    monkeypatch.setattr("codec.weight_sync.store.bucket._BLOCK", size)
    around(monkeypatch, "read", lambda found, begin, end: begins.append(begin) if found == name else None)
    assert pull(codec.WeightReceiver(), url) == 0
    assert sorted(begins) == [*range(0, one.nbytes, size)]
    store.put(name, store.get(name, one.nbytes) + b"x")
    with pytest.raises(codec.FrameError, match="has more than"):
        pull(codec.WeightReceiver(), url)


def test_bucket_that_was_emptied_begins_again(url):
    with Publisher(url) as publisher:
        published(publisher, 2)
        store = ObjectStore(url)
        store.delete(store.names())
        receiver = codec.WeightReceiver()
        with pytest.raises(codec.ArgumentError, match="is not a store of updates"):
            pull(receiver, url)
        assert publisher.publish(stepped(weights(), 4)) == 2
        assert pull(receiver, url) == 2
        UpdateStore(url).clear()
        assert pull(codec.WeightReceiver(), url) is None
        assert [name for name in store.names() if not name.startswith("head")] == []


def test_list_with_the_highest_number_is_an_error_for_publishers(url):
    """A list with the next number would not be found."""
    store = ObjectStore(url)
    with Publisher(url) as publisher:
        store.put(f"head-{'9' * 20}", store.get(f"head-{0:020d}", 1 << 20))
        with pytest.raises(codec.ArgumentError, match="no list can follow"):
            publisher.publish(weights())
        store.delete([f"head-{'9' * 20}"])
    with Publisher(url) as publisher:
        assert publisher.publish(weights()) == 0


@pytest.mark.parametrize("name", ["head-" + "\u0669" * 20, "head-" + "9" * 21, "old-head-" + "9" * 20])
def test_objects_of_other_names_are_no_lists(url, name):
    """\u0669 is the digit 9 in Arabic."""
    with Publisher(url) as publisher:
        ObjectStore(url).put(name, b"")
        assert publisher.publish(weights()) == 0
    assert pull(codec.WeightReceiver(), url) == 0


def test_store_that_replaces_objects_is_refused(url, monkeypatch):
    def create(self, name, data):
        self.put(name, data)
        return True

    monkeypatch.setattr(ObjectStore, "create", create)
    with pytest.raises(codec.ArgumentError, match="ignores the condition"):
        Publisher(url)
    assert ObjectStore(url).names() == []


def test_partial_upload_is_an_error_and_the_list_is_unchanged(url, monkeypatch):
    """An upload that stores other bytes than were sent is repeated, and never named by a list."""
    with Publisher(url) as publisher:
        published(publisher, 1)
        around(monkeypatch, "size", result=lambda n, name: n - name.endswith("update"))
        with pytest.raises(codec.ArgumentError, match=r"cannot write 0+1-.* bytes after \d+ bytes were written"):
            publisher.publish(stepped(weights(), 1))
        assert pull(codec.WeightReceiver(), url) == 0
        monkeypatch.undo()
        assert publisher.commit() == 1
        assert pull(codec.WeightReceiver(), url) == 1


def test_adapters_are_sent_through_a_bucket(url, tmp_path):
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q"]}
    lora = {f"base_model.model.q.lora_{k}.weight": np.ones((2, 2), np.float32) for k in "AB"}
    with AdapterPublisher(url) as publisher, AdapterReceiver(tmp_path) as receiver:
        publisher.publish({"policy": (config, lora)})
        assert receiver.pull(publisher.source) == 0
        assert list(receiver.paths) == ["policy-v0"]


def test_temporary_folders_of_killed_processes_are_deleted(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if (pid := os.fork()) == 0:
        left = StagingFolder()
        os.utime(left.folder, (0, 0))
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 1
    used = StagingFolder()
    assert list(tmp_path.iterdir()) == [used.folder]
    os.utime(used.folder, (0, 0))
    if os.fork() == 0:  # a child deletes nothing of its parent, not even at its end
        StagingFolder()._delete()
        used._delete()
        os._exit(0)
    os.wait()
    assert list(tmp_path.iterdir()) == [used.folder]
    del used
    assert list(tmp_path.iterdir()) == []


def test_urls_name_stores_only():
    assert location("folder", "S3://bucket/run/") == "s3://bucket/run"
    assert location("folder", "abfs://container@account.dfs.core.windows.net/run").endswith("windows.net/run")
    assert location("folder", "file:///a/b") == location("folder", Path("/a/b")) == Path("/a/b")
    for bad, message in (
        ("hf://buckets/me/run", "'hf' is not known"),
        ("simplecache::s3://bucket/run", "'simplecache::s3' is not known"),
        ("s3://user@bucket/run", "must hold no user"),
        ("az://name:hunter2@bucket/run", "must hold no user"),
        ("gs://bucket/run?token=hunter2", "must hold no user"),
        ("s3://", "names no bucket"),
        ("file://a/b", "three slashes"),
        (Path("s3://bucket/run"), "pass a str, not a Path"),
        (3, "must be a path, or a URL"),
        (b"/a", "must be a path, or a URL"),
    ):
        with pytest.raises(codec.ArgumentError, match=message) as e:
            location("folder", bad)
        assert "hunter2" not in str(e.value)
    for call in (
        lambda url: folder_at("folder", url),
        lambda url: codec.WeightReceiver(folder=url),
        lambda url: codec.WeightSender({}, folder=url),
        lambda url: serve(url),
        lambda url: AdapterReceiver(url),
    ):
        with pytest.raises(codec.ArgumentError, match="must be the path of a folder on a disk"):
            call("s3://bucket/run")
    with pytest.raises(codec.ArgumentError, match="leave out host="):
        Publisher("memory://x", host="127.0.0.1")
    with pytest.raises(codec.ArgumentError, match="is none"):
        pull(codec.WeightReceiver(), "memory://x", token="t" * 20)


def test_error_of_a_bucket_shows_no_credential(url, monkeypatch):
    """Neither the message nor a cause shows credentials of the environment, or of a signed URL."""
    secret = "hunter2/hunter2+hunter2"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"key": "id-hunter2", "client_kwargs": {"aws_session_token": secret[::-1]}}
    )
    texts = (
        f"denied for {secret} and {secret[::-1]}, id-hunter2",
        "GET https://account.blob.core.windows.net/run/head?sv=1&sig=hunter2%3D failed",
        "http://user:hunter2@proxy:8080/ refused",
        "AccountName=a;AccountKey=hunter2==;EndpointSuffix=x",
        '{"refresh_token": "hunter2"}',
        "the key AKIAHUNTER2HUNTER2X is unknown".replace("HUNTER2", "4HUNTER24"),
    )
    for text in texts:

        def fail(*args, text=text):
            raise OSError(text)

        around(monkeypatch, "names", fail)
        start = time.monotonic()
        with pytest.raises(codec.ArgumentError, match="cannot list its objects: OSError") as e:
            read_head(url)
        assert time.monotonic() - start < 30
        assert e.value.__context__ is None
        assert "***" in str(e.value)
        assert "hunter2" not in str(e.value).lower()


@pytest.mark.parametrize("error", [OSError(16, "SlowDown"), TimeoutError("no answer"), RuntimeError("lost")])
def test_calls_that_fail_for_a_while_are_repeated(url, error, monkeypatch):
    with Publisher(url) as publisher:
        publisher.publish(weights())
    tries = []

    def fail(*args):
        tries.append(args)
        if len(tries) % 4:
            raise error

    around(monkeypatch, "names", fail)
    around(monkeypatch, "read", fail)
    assert pull(codec.WeightReceiver(), url) == 0
    assert len(tries) == 12


@pytest.mark.parametrize("error", [PermissionError("denied"), TypeError("wrong")])
def test_errors_that_repetition_cannot_cure_are_raised_at_once(url, error, monkeypatch):
    tries = []

    def fail(*args):
        tries.append(args)
        raise error

    around(monkeypatch, "names", fail)
    with pytest.raises(codec.ArgumentError, match=str(error)):
        read_head(url)
    assert len(tries) == 1
