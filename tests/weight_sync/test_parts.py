"""Updates in parts in stores: receivers get all parts of an update, or an error that leaves their weights unchanged."""

import hashlib
import json
import os

import numpy as np
import pytest

import codec
from codec.weight_sync import UpdateStore, pull
from codec.weight_sync.bases.base import Base
from codec.weight_sync.http.server import serve
from codec.weight_sync.store.source import StoreReader
from codec.weight_sync.updates.listing import Listing
from codec.weight_sync.updates.parts import Part, PartedUpdate, Parts
from codec.weight_sync.updates.shards import Shard
from codec.weight_sync.updates.signatures import signed
from codec.weight_sync.updates.writing import write_update

RUN = b"a run of 16 byte"
KEY = codec.files.signing.SigningKey.to_sign(b"0123456789abcdef")


def halves(version):
    """Return the shards of two ranks: rows of `w`, and a tensor of each rank."""
    x = np.full((6, 4), version, np.float32)
    x[:, 0] = np.arange(6)
    return [
        {Shard("w", (6, 4), (0, 0)): x[:2], Shard("a", (3,), (0,)): x[:3, 1].copy()},
        {Shard("w", (6, 4), (2, 0)): x[2:], Shard("b", (), ()): x[0, 1].copy()},
    ]


def has(receiver, version):
    tensors, (first, second) = dict(receiver.tensors()), halves(version)
    whole = np.concatenate([next(iter(each.values())) for each in (first, second)])
    return (tensors["w"] == whole).all() and (tensors["a"] == version).all() and tensors["b"] == version


class Trainer:
    """Writer of the files that two ranks write."""

    def __init__(self, folder, key=None):
        self.store, self.key = UpdateStore(folder, sign=key), key
        self.bases = [Base(), Base()]
        self.version = -1

    def publish(self, full=False, urls=(None, None)):
        """Publish the next version."""
        full, base = full or self.version < 0, self.version
        self.version += 1
        found = {}
        for rank, (shards, own) in enumerate(zip(halves(self.version), self.bases, strict=True)):
            weights = None if full else own.weights
            file = self.store.path(self.version, None if full else base, rank)
            found[rank] = write_update(
                shards, self.version, weights, base, file=file, options=None, run=RUN, key=self.key
            )
            self.store.put(found[rank], rank)
            own.apply(found[rank])
        entries = [Part.of(update, url) for update, url in zip(found.values(), urls, strict=True)]
        parts = Parts.of(RUN, self.version, None if full else base, entries)
        self.store.publish(PartedUpdate(parts.to_bytes(self.key), parts, found))


@pytest.mark.parametrize("key", [None, KEY])
def test_receivers_follow_updates_in_parts(tmp_path, key):
    trainer, follower = Trainer(tmp_path / "store", key), codec.WeightReceiver(folder=tmp_path / "r", verify=key)
    with serve(tmp_path / "store") as server:
        for version in range(4):
            trainer.publish(full=version == 2)
            assert pull(follower, server.url) == version
            late = codec.WeightReceiver(verify=key)
            assert pull(late, tmp_path / "store") == version
            assert has(follower, version)
            assert has(late, version)
            assert follower.digest == late.digest == trainer.store.listing().last.digest
    follower.close()
    with codec.WeightReceiver(folder=tmp_path / "r", verify=key) as again:
        assert has(again, 3)


def test_store_deletes_parts_with_their_update(tmp_path):
    trainer = Trainer(tmp_path)
    for _ in range(6):
        trainer.publish(full=True)
    assert sorted(p.name for p in tmp_path.glob("*.*")) == sorted(
        f"{v:020d}.snapshot{end}" for v in (4, 5) for end in ("", ".0", ".1")
    )


def changes():
    """Yield names, changes of the list of parts, and messages of the errors."""

    def put(rank, name, value):
        return lambda found: found["parts"][rank].__setitem__(name, value)

    other = "is not the update that the list"
    yield "no part", lambda found: found["parts"].clear(), "no parts"
    yield "one part", lambda found: found["parts"].pop(), other
    yield "part twice", lambda found: found["parts"].append(found["parts"][0]), other
    yield "parts exchanged", lambda found: found["parts"].reverse(), other
    yield "other version", lambda found: found.update(version=7), other
    yield "other base", lambda found: found.update(base=None), other
    yield "base after version", lambda found: found.update(base=9), "does not follow"
    yield "version that is no number", lambda found: found.update(version=True), "no version"
    yield "other run", lambda found: found.update(run="00" * 16), other
    yield "short run", lambda found: found.update(run="00"), "no run"
    yield "other format", lambda found: found.update(format=2), "another format"
    yield "size", put(1, "nbytes", 10), other
    yield "negative size", put(1, "nbytes", -10), "no digests or sizes"
    yield "number of tensors", put(1, "tensors", [3, 68]), "is another update"
    yield "tensors that are no pair", put(1, "tensors", [3]), "not the list of the parts"
    yield "digest", put(0, "digest", "00" * 16), other
    yield "long digest", put(0, "digest", "00" * 17), "no digests or sizes"
    yield "URL beside a folder", put(0, "url", "http://127.0.0.1:1"), "is on no server"
    yield "URL that is no text", put(0, "url", 5), "URL of a part is invalid"
    yield "long URL", put(0, "url", "http://" + "a" * 999), "URL of a part is invalid"


def relist(store, contents):
    """Let the list of the store name other contents for the list of the parts of its last update."""
    listing = store.listing()
    last = listing.updates[-1]._replace(nbytes=len(contents), sha256=hashlib.sha256(contents).digest())
    changed = listing._replace(updates=(*listing.updates[:-1], last))
    (store.folder / "head").write_bytes(changed.to_bytes(store.key))


@pytest.mark.parametrize(("name", "change", "message"), list(changes()), ids=lambda x: x if type(x) is str else "")
def test_crafted_lists_of_parts_are_refused(tmp_path, name, change, message):
    trainer, receiver = Trainer(tmp_path), codec.WeightReceiver()
    trainer.publish()
    pull(receiver, tmp_path)
    trainer.publish()
    path = trainer.store.path(1, 0)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    relist(trainer.store, path.read_bytes())
    with pytest.raises(codec.FrameError, match=message):
        pull(receiver, tmp_path)
    assert has(receiver, 0)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"[" * 100_000, b'{"a":' * 20_000, b"," * 100, b"\x89CWU\r\n\x1a\n"]
)
def test_other_files_than_lists_of_parts_are_refused(body):
    with pytest.raises(codec.FrameError, match="not the list of the parts"):
        Parts.parse(body)


def test_lost_damaged_and_old_parts_are_refused(tmp_path):
    trainer, receiver = Trainer(tmp_path), codec.WeightReceiver()
    trainer.publish()
    trainer.publish()
    path, other = trainer.store.path(1, 0, 1), trainer.store.path(0, None, 1)
    data = path.read_bytes()
    for wrong in (data[:-1], data + b"\0", data[:200] + b"\0" + data[201:], other.read_bytes(), b""):
        path.write_bytes(wrong)
        with pytest.raises(codec.FrameError):
            pull(receiver, tmp_path)
        assert receiver.version == 0
        assert has(receiver, 0)
    path.unlink()
    with pytest.raises(codec.ArgumentError, match="cannot be read"):
        pull(receiver, tmp_path)
    path.write_bytes(data)
    assert pull(receiver, tmp_path) == 1


def test_unsigned_parts_and_lists_are_refused(tmp_path):
    trainer, receiver = Trainer(tmp_path, KEY), codec.WeightReceiver(verify=b"0123456789abcdef")
    trainer.publish()
    pull(receiver, tmp_path)
    trainer.publish()
    part, file = trainer.store.path(1, 0, 1), trainer.store.path(1, 0)
    signed_part, signed_list = part.read_bytes(), file.read_bytes()
    size = len(signed_part) - len(signed(b"", KEY))
    part.write_bytes(signed_part[:size] + signed(b"other", KEY))
    with pytest.raises(codec.FrameError, match="does not match"):
        pull(receiver, tmp_path)
    part.write_bytes(signed_part)
    file.write_bytes(Parts.parse(signed_list, KEY).to_bytes())
    relist(trainer.store, file.read_bytes())
    with pytest.raises(codec.FrameError, match="not signed"):
        pull(receiver, tmp_path)
    assert has(receiver, 0)
    file.write_bytes(signed_list)
    relist(trainer.store, signed_list)
    assert pull(receiver, tmp_path) == 1


def test_parts_come_from_the_servers_that_the_list_names(tmp_path):
    trainer = Trainer(tmp_path / "0")
    (tmp_path / "1").mkdir()
    with serve(tmp_path / "0") as first, serve(tmp_path / "1") as second:
        trainer.publish(urls=(None, second.url))
        path = trainer.store.path(0, None, 1)
        path.rename(tmp_path / "1" / path.name)
        receiver = codec.WeightReceiver()
        assert pull(receiver, first.url) == 0
        assert has(receiver, 0)
        with pytest.raises(codec.FrameError, match="is on no server"):
            pull(codec.WeightReceiver(), tmp_path / "0")
        trainer.publish(urls=(None, second.url))
        with pytest.raises(codec.ArgumentError, match="does not exist"):
            pull(receiver, first.url)
        assert has(receiver, 0)


def test_receivers_do_not_read_parts_of_which_they_keep_nothing(tmp_path):
    """A snapshot shows which parts these are. With one of them lost, the receiver follows the updates."""
    trainer, served = Trainer(tmp_path / "store"), {"w": (np.zeros((2, 4), np.float32), (3, 0))}
    receiver = codec.WeightReceiver(only=served, folder=tmp_path / "receiver")
    trainer.publish()
    pull(receiver, tmp_path / "store", into=served)
    for version in (1, 2):
        trainer.publish()
        trainer.store.path(version, version - 1, 0).unlink()
        assert pull(receiver, tmp_path / "store", into=served) == version
        assert (served["w"][0][:, 1:] == version).all()
        assert receiver.digest == trainer.store.listing().last.digest
    trainer.publish()
    trainer.store.path(3, 2, 1).unlink()
    with pytest.raises(codec.ArgumentError, match="cannot be read"):
        pull(receiver, tmp_path / "store", into=served)
    trainer.publish(full=True)
    assert pull(receiver, tmp_path / "store", into=served) == 4
    receiver.close()


def test_part_with_the_tensors_of_another_part_is_refused(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.publish()
    one = trainer.store.listing().updates[0]
    with StoreReader(tmp_path) as store:
        parts, update = store.parts(one), store.update(one)
    twice = Parts.of(RUN, 0, None, [parts.parts[0]] * 2)
    with pytest.raises(codec.FrameError, match="is in two parts"):
        PartedUpdate(b"", twice, {0: update.found[0], 1: update.found[0]})
    head = Listing.parse((tmp_path / "head").read_bytes())
    assert [one.nparts for one in head.updates] == [2]
    assert parts.listed(1).file == "00000000000000000000.snapshot.1"
    assert codec.Update(b"".join(update.chunks())).digest == update.digest


def test_buckets_store_parts_and_delete_them_with_their_update():
    url = f"memory://{os.urandom(8).hex()}"
    trainer, follower = Trainer(url), codec.WeightReceiver()
    for version in range(6):
        trainer.publish(full=version % 2 == 0)
        assert pull(follower, url) == version
        late = codec.WeightReceiver()
        assert pull(late, url) == version
        assert has(late, version)
    kept = [name for name in trainer.store._files._bucket.store.names() if not name.startswith("head")]
    assert sorted(name[:20] + name[86:] for name in kept) == [
        f"{v:020d}.{'update' if v % 2 else 'snapshot'}{end}" for v in (2, 3, 4, 5) for end in ("", ".0", ".1")
    ]
