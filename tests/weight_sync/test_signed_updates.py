"""Signed updates: what a mirror, a proxy or a disk between trainer and receivers cannot change."""

import json
import pickle
import shutil

import numpy as np
import pytest

import codec
from codec.files.signing import SigningKey
from codec.weight_sync import Publisher, UpdateStore, pull, serve
from codec.weight_sync.store.source import read_head
from support.weight_updates import equal, published, stepped, weights

KEY, OTHER = b"0123456789abcdef", b"0123456789abcdeF"


@pytest.fixture
def store(tmp_path):
    """A signed store of 4 versions, with a snapshot and updates; return its folder and all weights."""
    with Publisher(tmp_path / "store", sign=KEY) as publisher:
        return tmp_path / "store", published(publisher, 4)


def fails(folder, error, match=None, receiver=None):
    """Check that a pull of the files, also over HTTP, raises an error, and leaves the receiver at its version."""
    receiver = receiver or codec.WeightReceiver(verify=KEY)
    before = receiver.version
    with serve(folder) as server:
        for source in (folder, server.url):
            with pytest.raises(error, match=match):
                pull(receiver, source)
            assert receiver.version == before


def test_signed_store_reaches_receivers_with_and_without_key(store):
    folder, all_weights = store
    for verify in (KEY, None, SigningKey(KEY)):
        receiver = codec.WeightReceiver(verify=verify)
        assert pull(receiver, folder) == 3
        assert equal(all_weights[3], receiver.tensors())
    fails(
        folder, codec.FrameError, "signature of the list .*signed with another key", codec.WeightReceiver(verify=OTHER)
    )


def test_signed_updates_over_another_connection():
    first = weights()
    sender, receiver = codec.WeightSender(first, sign=KEY), codec.WeightReceiver(verify=KEY)
    receiver.apply(bytes(sender.snapshot().data))
    update = sender.diff(stepped(first, 1))
    for data, match in (
        (bytes(update.data)[:-41], "not signed"),
        (bytes(codec.WeightSender(first).snapshot().data), "not signed"),
        (bytes(codec.WeightSender(first, sign=OTHER).snapshot().data), "signature of the update does not match"),
    ):
        with pytest.raises(codec.FrameError, match=match):
            receiver.apply(data, restart=True)
    assert receiver.version == 0
    receiver.apply(bytes(update.data))
    assert receiver.version == 1
    unsigned = codec.Update(bytes(update.data)[:-41])
    assert (unsigned.signature, len(update.signature)) == (None, 33)


def test_every_changed_or_missing_byte_of_an_update_is_an_error():
    sender = codec.WeightSender({"w": np.zeros(3, np.float32)}, sign=KEY)
    receiver = codec.WeightReceiver({"w": np.zeros(3, np.float32)}, verify=KEY)
    data = bytes(sender.diff({"w": np.ones(3, np.float32)}).data)
    for k in range(len(data)):
        with pytest.raises(codec.CodecError):
            receiver.apply(data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :])
        with pytest.raises(codec.CodecError):
            receiver.apply(data[:k])
    with pytest.raises(codec.FrameError):
        receiver.apply(data + b"\0")
    assert receiver.version == 0


def test_update_that_is_valid_but_has_other_weights_is_refused(store, tmp_path):
    """An attacker without the key makes a whole store with right digests, and the same run and versions."""
    folder, all_weights = store
    run = read_head(folder).run
    sender = codec.WeightSender(all_weights[0])
    sender._base.run = run
    forged = UpdateStore(tmp_path / "forged")
    forged.publish(sender.snapshot())
    fails(tmp_path / "forged", codec.FrameError, "list of updates is not signed")
    shutil.copy(tmp_path / "forged" / f"{0:020d}.snapshot", folder)
    fails(folder, codec.FrameError, "is not the update")


def test_changed_cut_and_reordered_files_of_a_store_are_errors(store):
    folder, _ = store
    head = (folder / "head").read_bytes()
    body = json.loads(head)
    updates = body["updates"]
    for changed in (
        {**body, "updates": updates[:-1]},
        {**body, "updates": updates[::-1]},
        {**body, "run": "00" * 16},
        {**body, "updates": []},
        {k: v for k, v in body.items() if k != "signature"},
        {**body, "signature": "0" * 64},
        {**body, "signature": "01" + "0" * 64},
        {**body, "signature": "02" + "0" * 128},
    ):
        (folder / "head").write_bytes(json.dumps(changed).encode())
        fails(folder, codec.FrameError, "/head': the .*(does not match|is (not )?signed)")
    (folder / "head").write_bytes(head[:-1])
    fails(folder, codec.FrameError, "not signed")
    (folder / "head").write_bytes(head)
    one, two = (folder / f"{k:020d}.update" for k in (1, 2))
    saved = one.read_bytes(), two.read_bytes()
    for pair in (saved[::-1], (saved[0][:-1], saved[1]), (saved[0] + b"x", saved[1]), (b"", saved[1])):
        one.write_bytes(pair[0])
        two.write_bytes(pair[1])
        receiver = codec.WeightReceiver(verify=KEY)
        with pytest.raises(codec.FrameError):
            pull(receiver, folder)
        assert receiver.version == 0
        fails(folder, codec.FrameError, receiver=receiver)


def test_replayed_lists_cannot_go_back(tmp_path):
    """A receiver refuses an older list of its run, and every list of an earlier run."""
    folder, old, older = tmp_path / "store", tmp_path / "old", tmp_path / "older"
    with Publisher(folder, sign=KEY) as publisher:
        published(publisher, 3)
    shutil.copytree(folder, older)
    with Publisher(folder, sign=KEY) as publisher:  # another run, which begins with version 3
        assert publisher.publish(weights()) == 3
        shutil.copytree(folder, old)
        assert publisher.publish(stepped(weights(), 1)) == 4
    receiver = codec.WeightReceiver(verify=KEY, folder=tmp_path / "receiver")
    assert pull(receiver, older) == 2
    assert pull(receiver, folder) == 4
    receiver.close()
    receiver = codec.WeightReceiver(verify=KEY, folder=tmp_path / "receiver")
    fails(old, codec.StateError, "leads to version 3, but the weights had version 4 already", receiver)
    fails(older, codec.StateError, "leads to version 2", receiver)
    receiver.close()
    ignoring = codec.WeightReceiver()
    assert (pull(ignoring, folder), pull(ignoring, older)) == (4, 2)


def test_list_of_one_run_with_files_of_another_is_refused(tmp_path):
    """Both runs have equal versions and the key."""
    for name, seed in (("one", 0), ("two", 5)):
        with Publisher(tmp_path / name, sign=KEY) as publisher:
            publisher.publish(stepped(weights(), seed))
            publisher.publish(stepped(weights(), seed + 1))
    for path in (tmp_path / "two").glob("0*"):
        shutil.copytree(tmp_path / "one", tmp_path / path.name)
        shutil.copy(path, tmp_path / path.name)
        receiver = codec.WeightReceiver(verify=KEY)
        for _ in range(2):
            with pytest.raises(codec.FrameError, match=r"is not the update that|has more than"):
                pull(receiver, tmp_path / path.name)
        assert receiver.version == (0 if path.suffix == ".update" else None)


def test_snapshot_of_an_earlier_run_is_refused_over_another_connection():
    old, new = (codec.WeightSender(weights(), version=version, sign=KEY) for version in (3, 4))
    receiver, ignoring = codec.WeightReceiver(verify=KEY), codec.WeightReceiver()
    for each in (receiver, ignoring):
        each.apply(new.snapshot().data)
    ignoring.apply(old.snapshot().data, restart=True)
    with pytest.raises(codec.StateError, match="leads to version 3, but the weights had version 4 already"):
        receiver.apply(old.snapshot().data, restart=True)
    assert (receiver.version, ignoring.version) == (4, 3)


def test_files_of_a_folder_cannot_change_after_their_check(store, monkeypatch):
    """A receiver with a key copies the files of a folder, which others may write to."""
    folder, all_weights = store
    check = codec.weight_sync.updates.update.check_signature

    def then_change(*arguments):
        check(*arguments)
        for path in folder.glob("0*"):
            path.write_bytes(bytes(path.stat().st_size))

    monkeypatch.setattr(codec.weight_sync.updates.update, "check_signature", then_change)
    receiver = codec.WeightReceiver(verify=KEY)
    with pytest.raises(codec.FrameError):
        pull(receiver, folder)
    assert receiver.version == 0
    assert equal(all_weights[0], receiver.tensors())


def test_publisher_refuses_to_adopt_what_it_has_not_signed(tmp_path):
    with Publisher(tmp_path / "plain") as publisher:
        published(publisher, 1)
    with pytest.raises(codec.FrameError, match=r"not signed, .* empty folder"):
        Publisher(tmp_path / "plain", sign=KEY).publish(weights())
    store = UpdateStore(tmp_path / "store", sign=KEY)
    with pytest.raises(codec.ArgumentError, match=r"pass sign= to the WeightSender"):
        store.publish(codec.WeightSender(weights()).snapshot())
    store.publish(codec.WeightSender(weights(), sign=KEY).snapshot())


def test_publisher_continues_a_signed_store_after_a_restart(tmp_path):
    how = {"sign": KEY, "base": tmp_path / "base", "snapshot_every": 2}
    with Publisher(tmp_path / "store", **how) as publisher:
        published(publisher, 4)
    with Publisher(tmp_path / "store", **how) as publisher:
        assert publisher.publish(stepped(weights(), 9)) == 4
    receiver = codec.WeightReceiver(verify=KEY)
    assert pull(receiver, tmp_path / "store") == 4
    assert equal(stepped(weights(), 9), receiver.tensors())


def test_keys_come_from_bytes_and_files(tmp_path):
    path = tmp_path / "key"
    for content in (KEY, KEY + b"\n", KEY + b"\r\n"):
        path.write_bytes(content)
        path.chmod(0o600)
        for given in (path, str(path)):
            assert SigningKey(given).sign(b"x", []) == SigningKey(KEY).sign(b"x", [])
    path.chmod(0o640)
    with pytest.warns(UserWarning, match=r"other users may read .*chmod 600"):
        SigningKey(path)
    for given, match in (
        (b"short", "has 5 bytes, but needs at least 16"),
        (tmp_path / "none", "cannot be read"),
        ("/dev/zero", "not a regular file"),
        (7, "got an object of int"),
    ):
        with pytest.raises(codec.ArgumentError, match=match):
            codec.WeightReceiver(verify=given)
    path.write_bytes(bytes(70000))
    path.chmod(0o600)
    with pytest.raises(codec.ArgumentError, match="neither a key nor a token"):
        SigningKey(path)


def test_key_is_in_no_repr_or_pickle(tmp_path):
    key = SigningKey(KEY)
    with Publisher(tmp_path, sign=KEY) as publisher:
        publisher.publish(weights())
        for one in (key, publisher, publisher._sender, publisher._store, codec.WeightReceiver(verify=KEY)):
            assert KEY.decode() not in repr(one) + repr(getattr(one, "__dict__", None))
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)
    assert not any(KEY in path.read_bytes() for path in tmp_path.iterdir())
