"""Runs of trainers, lists of updates, and the chain that a receiver needs."""

import json
import shutil
import time

import pytest

import codec
from codec.weight_sync import Publisher, pull, serve
from codec.weight_sync.store.source import read_head
from codec.weight_sync.updates.identity import Identity, UpdateHead
from codec.weight_sync.updates.listing import Listed, Listing, chain
from support.weight_updates import equal, published, stepped, weights


def test_receivers_follow_a_run_that_begins_again_in_an_empty_folder(tmp_path):
    receiver, folder = codec.WeightReceiver(), tmp_path / "store"
    runs = []
    for begin in range(2):
        with Publisher(folder) as publisher:
            for k in range(4 - begin):
                new = stepped(weights(begin), k)
                assert publisher.publish(new) == k
                assert pull(receiver, folder) == k
                assert equal(new, receiver.tensors())
        runs.append(receiver.run)
        shutil.rmtree(folder)
    assert runs[0] != runs[1]


@pytest.mark.parametrize("lost", ["store", "head", "old copy", "update"])
def test_publisher_whose_store_does_not_lead_to_its_base_publishes_a_snapshot(tmp_path, lost):
    folder, copy = tmp_path / "store", tmp_path / "copy"
    receiver = codec.WeightReceiver()
    with Publisher(folder, base=tmp_path / "base") as publisher:
        all_weights = published(publisher, 2)
        pull(receiver, folder)
        shutil.copytree(folder, copy)
        publisher.publish(stepped(all_weights[1], 2))
    if lost == "head":
        (folder / "head").unlink()
    else:
        shutil.rmtree(folder)
        if lost in ("old copy", "update"):
            shutil.copytree(copy, folder)
    if lost == "update":
        shutil.rmtree(tmp_path / "base")
        with codec.WeightSender(stepped(weights(), 5), folder=tmp_path / "base", version=1):
            pass
    with Publisher(folder, base=tmp_path / "base") as publisher:
        new = stepped(all_weights[1], 3)
        version = publisher.publish(new)
        assert read_head(folder).updates[-1].head.base is None
        assert pull(receiver, folder) == version
        assert equal(new, receiver.tensors())
        shutil.rmtree(folder)  # also under a publisher that goes on
        newer = stepped(new, 4)
        assert publisher.publish(newer) == version + 1
        assert pull(receiver, folder) == version + 1
        assert equal(newer, receiver.tensors())


def test_second_publisher_takes_a_store_over_and_the_first_one_is_told(tmp_path):
    with Publisher(tmp_path) as first, Publisher(tmp_path) as second:
        published(first, 2)
        new = stepped(weights(), 9)
        assert second.publish(new) == 2
        receiver = codec.WeightReceiver()
        assert pull(receiver, tmp_path) == 2
        with pytest.raises(codec.StateError, match="another publisher has published"):
            first.publish(weights())
        assert second.publish(stepped(new, 1)) == 3
        assert sorted(p.name.lstrip("0") for p in tmp_path.glob("*.*")) == ["2.snapshot", "3.update"]


@pytest.mark.parametrize("kind", ["snapshot", "update"])
def test_file_of_another_run_under_a_listed_name_is_refused(tmp_path, kind):
    """A cache, or a copy by size, has a file of an earlier run, which the list of the new run names."""
    for run in range(2):
        with Publisher(tmp_path / str(run)) as publisher:
            publisher.publish(stepped(weights(), run))
            publisher.publish(stepped(weights(), run + 2))
    name = next(p.name for p in (tmp_path / "0").glob(f"*.{kind}"))
    shutil.copy(tmp_path / "0" / name, tmp_path / "1" / name)
    with serve(tmp_path / "1") as server:
        for source in (tmp_path / "1", server.url):
            receiver = codec.WeightReceiver()
            with pytest.raises(codec.FrameError, match=r"not the update that the list|more than|truncated"):
                pull(receiver, source)
            assert receiver.version == (None if kind == "snapshot" else 0)


def test_pushed_update_of_another_run_is_an_error_that_names_the_remedy():
    receiver = codec.WeightReceiver(weights())
    old, new = codec.WeightSender(weights()), codec.WeightSender(stepped(weights(), 1))
    receiver.apply(old.diff(stepped(weights(), 2)))
    assert receiver.run == old.run
    for update in (new.snapshot(), new.diff(stepped(weights(), 3))):
        with pytest.raises(
            codec.StateError, match=r"of another run of the trainer .* pass its snapshot with restart=True"
        ):
            receiver.apply(update)
    receiver.apply(new.snapshot(), restart=True)
    receiver.apply(new.diff(stepped(weights(), 3)))
    assert (receiver.run, receiver.version) == (new.run, new.pending.version)
    assert equal(stepped(weights(), 3), receiver.tensors())


def test_folders_keep_their_run(tmp_path):
    with codec.WeightSender(weights(), folder=tmp_path / "base") as sender:
        run = sender.run
        with codec.WeightReceiver(folder=tmp_path / "rollout") as receiver:
            receiver.apply(sender.snapshot())
    with codec.WeightSender(folder=tmp_path / "base") as sender:
        assert sender.run == run
    with codec.WeightReceiver(folder=tmp_path / "rollout") as receiver:
        assert receiver.run == run
        with pytest.raises(codec.StateError, match="of another run"):
            receiver.apply(codec.WeightSender(weights(), version=5).snapshot())


def test_receiver_ahead_of_an_old_copy_of_the_store_is_an_error(tmp_path):
    with Publisher(tmp_path / "store") as publisher:
        published(publisher, 2)
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        publisher.publish(stepped(weights(), 7))
        receiver = codec.WeightReceiver()
        pull(receiver, publisher.source)
    with pytest.raises(codec.StateError, match="the store is an old copy"):
        pull(receiver, tmp_path / "copy")
    assert receiver.version == 2


def listed(version, base, run=b"r" * 16):
    """Return an entry of weights whose digests are their versions."""
    before = bytes(16) if base is None else base.to_bytes(16, "little")
    return Listed(UpdateHead(run, version, base, before, version.to_bytes(16, "little")), 1)


def listing(*updates):
    return Listing(updates[0].head.run, updates)


def test_chain_leads_from_the_weights_or_from_the_last_snapshot():
    updates = [listed(*one) for one in ((0, None), (1, 0), (2, 1), (2, None), (3, 2), (5, 3))]
    last = listing(*updates)
    assert [one.head.version for one in chain(last, updates[0].head.after)] == [1, 2, 3, 5]
    assert [one.head.version for one in chain(last, updates[1].head.after)] == [2, 3, 5]
    for at in (None, Identity(None, 7, bytes(16)), Identity(b"x" * 16, 1, updates[1].head.digest)):
        assert [(one.head.version, one.head.base) for one in chain(last, at)] == [(2, None), (3, 2), (5, 3)]
    other_values = Identity(b"r" * 16, 1, b"?" * 16)
    assert chain(last, other_values)[0].head.base is None
    assert chain(last, last.last) == []
    assert chain(Listing(), other_values) == []


def test_lists_without_a_chain_are_errors():
    with pytest.raises(codec.StateError, match="no chain of updates leads from no weights, or from a snapshot, to"):
        chain(listing(listed(0, None), listed(9, 8)), None)
    with pytest.raises(codec.StateError, match="older than version 7 of the weights: the store is an old copy"):
        chain(listing(listed(5, None)), Identity(b"r" * 16, 7, bytes(16)))


def test_long_lists_are_walked_once():
    """The time is linear in the length of the list, also if no chain leads to its last version."""
    n = 20_000
    updates = [listed(0, None)] * n + [listed(k + 1, k) for k in range(n)]
    begin = time.process_time()
    assert len(chain(listing(*updates), None)) == n + 1
    with pytest.raises(codec.StateError, match="no chain"):
        chain(listing(*updates, listed(10 * n, 9 * n)), None)
    assert time.process_time() - begin < 2


ENTRY = {"version": 1, "base": None, "nbytes": 1, "digest": "00" * 16}


def head(run="11" * 16, **changes):
    return json.dumps({"format": 2, "run": run, "updates": [{**ENTRY, **changes}]}).encode()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"format": 1}', b"\xff", b"[" * 100_000, b"1" * 10_000, b"null",
    b'{"format": 2, "run": null, "updates": 5}', head(run=None), head(run="11"), head(run=3), head(version=-1),
    head(version="../x"), head(version=1e300), head(base=1), head(base=0), head(digest="0" * 31), head(nbytes=None),
    head(version=2**64)])  # fmt: skip
def test_damaged_lists_are_rejected(tmp_path, body):
    (tmp_path / "head").write_bytes(head())
    assert read_head(tmp_path).last.version == 1
    (tmp_path / "head").write_bytes(body)
    with pytest.raises(codec.FrameError, match="not a list of updates"):
        read_head(tmp_path)
