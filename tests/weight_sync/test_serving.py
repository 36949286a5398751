"""The program serves the version that the receiver returns, after restarts, failures and interruptions."""

import os
import signal

import numpy as np
import pytest

import codec
from codec.weight_sync import Publisher, pull
from support.weight_updates import equal, stepped, versions, weights


class Program:
    """Serving program with tensors of its own; `fail` calls of `load` raise an exception after two tensors."""

    def __init__(self, tensors, fail=0):
        self.tensors = {name: x.copy() for name, x in tensors.items()}
        self.fail = fail
        self.loaded = []

    def load(self, tensors):
        self.fail -= 1
        for k, (name, x) in enumerate(tensors):
            if self.fail >= 0 and k == 2:
                raise RuntimeError("busy")
            self.loaded.append(name)
            self.tensors[name] = x

    def way(self, way):
        return {"load": self.load} if way == "load" else {"into": self.tensors}


def only(tensors, name):
    """Return a copy of the tensors in which one tensor has changed."""
    return {**tensors, name: stepped(tensors, 5)[name]}


@pytest.fixture(params=["load", "into"])
def way(request):
    return request.param


@pytest.mark.parametrize("new", ["nothing", "one tensor"])
def test_restarted_program_gets_all_tensors_of_the_version(tmp_path, way, new):
    checkpoint = stepped(weights(), 8)
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(weights())
        with codec.WeightReceiver(folder=tmp_path / "rollout") as first:
            pull(first, publisher.source, **Program(checkpoint).way(way))
            assert first.unloaded == frozenset()
        last = weights()
        if new == "one tensor":
            last = only(last, "model.layers.0.norm.weight")
            publisher.publish(last)
        program = Program(checkpoint)
        with codec.WeightReceiver(folder=tmp_path / "rollout") as second:
            assert second.unloaded == set(last)
            assert pull(second, publisher.source, **program.way(way)) == publisher.version
            assert second.unloaded == frozenset()
        assert equal(last, program.tensors)


def test_update_that_is_pushed_again_after_a_restart_loads_what_the_program_lacks(tmp_path, way):
    all_weights, updates = versions(2)
    with codec.WeightReceiver(all_weights[0], folder=tmp_path) as first:
        first.apply(updates[0], **Program(all_weights[0]).way(way))
    program = Program(stepped(weights(), 8))
    with codec.WeightReceiver(folder=tmp_path) as second:
        second.apply(updates[0], **program.way(way))
        assert equal(all_weights[1], program.tensors)
        with pytest.raises(codec.StateError, match="applied already"):
            second.apply(updates[0], **program.way(way))


def test_closed_receiver_cannot_write_to_a_folder_that_another_one_uses(tmp_path):
    first = codec.WeightReceiver(weights(), folder=tmp_path)
    first.close()
    with codec.WeightReceiver(folder=tmp_path) as second:
        with pytest.raises(codec.StateError, match="is closed"):
            first.apply(codec.WeightSender(stepped(weights(), 1), version=3).snapshot(), restart=True)
        with pytest.raises(codec.StateError, match="is closed"):
            dict(first.tensors())
        assert first.version is None
        assert equal(weights(), second.tensors())


def test_pull_without_a_program_passes_the_tensors_to_a_later_one(tmp_path, way):
    program = Program(stepped(weights(), 8))
    with Publisher(tmp_path) as publisher:
        publisher.publish(weights())
        receiver = codec.WeightReceiver()
        assert pull(receiver, tmp_path) == 0
        assert pull(receiver, tmp_path, **program.way(way)) == 0
        assert equal(weights(), program.tensors)


@pytest.mark.parametrize("fail", [1, 2, 3, 4, 5])
def test_failed_loads_lose_no_tensor(fail):
    """Loads fail in a row, also those of the old values; then the program gets every tensor that it lacks."""
    first = weights()
    second = only(first, "model.layers.0.norm.weight")
    third = only(second, "model.embed_tokens.weight")
    sender, receiver, program = codec.WeightSender(first), codec.WeightReceiver(first), Program(first, fail)
    for new in (stepped(first, 1), second, third):
        receiver_update = sender.diff(new)
        try:
            receiver.apply(receiver_update, program.load)
        except RuntimeError:
            receiver.apply(receiver_update)  # the weights advance without the program
        sender.commit()
    receiver.apply(sender.diff(third), program.load)
    assert receiver.unloaded == frozenset()
    assert equal(third, program.tensors)


def test_old_values_that_could_not_be_restored_are_passed_again():
    all_weights, updates = versions(2)
    receiver, program = codec.WeightReceiver(all_weights[0]), Program(all_weights[0], fail=2)
    with pytest.raises(RuntimeError):
        receiver.apply(updates[0], program.load)
    assert receiver.version == 0
    assert receiver.unloaded
    receiver.reload(program.load, names=receiver.unloaded)
    assert receiver.unloaded == frozenset()
    assert equal(all_weights[0], program.tensors)


@pytest.mark.parametrize("place", ["prepare", "write", "complete"])
@pytest.mark.parametrize("error", [codec.StateError("disk full"), KeyboardInterrupt()])
def test_failed_commit_leaves_the_program_at_the_version_of_the_receiver(tmp_path, way, place, error, monkeypatch):
    all_weights, updates = versions(2)
    receiver, program = codec.WeightReceiver(all_weights[0], folder=tmp_path), Program(all_weights[0])
    original, calls = getattr(receiver._base, place), []

    def fail(*args):
        calls.append(None)
        if len(calls) == (2 if place == "write" else 1):
            raise error
        return original(*args)

    monkeypatch.setattr(receiver._base, place, fail)
    with pytest.raises(type(error)):
        receiver.apply(updates[0], **program.way(way))
    assert receiver.version == (0 if place == "prepare" else 1)
    assert receiver.unloaded == frozenset()
    assert equal(all_weights[receiver.version], program.tensors)
    assert equal(all_weights[receiver.version], receiver.tensors())
    receiver.close()
    with codec.WeightReceiver(folder=tmp_path) as restarted:
        assert equal(all_weights[restarted.version], restarted.tensors())


def test_update_in_place_that_cannot_be_completed_yet_is_an_error_and_then_the_new_version(tmp_path, way, monkeypatch):
    """If the disk fails inside an update, the program has the new values, and the receiver gets them later."""
    all_weights, updates = versions(3)
    receiver, program = codec.WeightReceiver(all_weights[0], folder=tmp_path), Program(all_weights[0])
    original, calls = receiver._base.write, []

    def fail(*args):
        calls.append(None)
        if len(calls) > 3:
            raise codec.StateError("disk full")
        return original(*args)

    monkeypatch.setattr(receiver._base, "write", fail)
    with pytest.raises(codec.StateError, match="disk full"):
        receiver.apply(updates[0], **program.way(way))
    with pytest.raises(codec.StateError, match="disk full"):
        receiver.apply(updates[1], **program.way(way))
    assert equal(all_weights[1], program.tensors)
    monkeypatch.undo()
    assert receiver.version == 1
    receiver.apply(updates[1], **program.way(way))
    assert equal(all_weights[2], program.tensors)
    receiver.close()


def test_snapshot_that_cannot_be_stored_leaves_the_old_version(tmp_path, way, monkeypatch):
    receiver, program = codec.WeightReceiver(weights(), folder=tmp_path), Program(weights())
    new = stepped(weights(), 3)
    snapshot = codec.WeightSender(new, version=4).snapshot()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(codec.StateError, match="No space left"):
        receiver.apply(snapshot, **program.way(way))
    assert (receiver.version, receiver.unloaded) == (0, frozenset())
    assert equal(weights(), program.tensors)
    monkeypatch.undo()
    receiver.apply(snapshot, **program.way(way))
    assert equal(new, program.tensors)
    receiver.close()
    assert len(os.listdir(tmp_path)) == 3


def test_commit_counts_tensors_that_updated_has_yielded():
    """A program that uses stage, updated and commit gets every tensor that it lacks, after any failure."""
    all_weights, updates = versions(4)
    receiver, program = codec.WeightReceiver(all_weights[0]), Program(all_weights[0], fail=1)
    receiver.stage(updates[0])
    with pytest.raises(RuntimeError):
        program.load(receiver.updated())
    receiver.discard()
    receiver.apply(updates[0])
    receiver.stage(updates[1])
    receiver.commit()
    assert receiver.unloaded
    receiver.stage(updates[2])
    program.load(receiver.updated())
    receiver.commit()
    assert receiver.unloaded == frozenset()
    assert equal(all_weights[3], program.tensors)


def test_reload_passes_all_current_tensors(way):
    receiver, program = codec.WeightReceiver(weights()), Program(stepped(weights(), 2))
    receiver.reload(**program.way(way))
    assert equal(weights(), program.tensors)
    with pytest.raises(codec.ArgumentError, match="either load= or into=, got neither"):
        receiver.reload()
    with pytest.raises(codec.ArgumentError, match="no tensor 'x'"):
        receiver.reload(program.load, names=["x"])


def test_tensors_that_are_read_across_an_update_are_an_error():
    all_weights, updates = versions(2)
    receiver = codec.WeightReceiver(all_weights[0])
    current, staged = receiver.tensors(), None
    next(current)
    receiver.stage(updates[0])
    staged = receiver.updated()
    next(staged)
    receiver.commit()
    for tensors in (current, staged):
        with pytest.raises(codec.StateError, match="would be of two versions"):
            next(tensors)
    assert equal(all_weights[1], receiver.tensors())


class Child:
    """Forked process that lives until the block ends; `result` is what `call` returned or raised in it."""

    def __init__(self, call=lambda: None):
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(writer, f"{call()!r}\n".encode())
            except BaseException as e:
                os.write(writer, f"{type(e).__name__}: {e}\n".encode())
            os.close(writer)
            signal.pause()
        os.close(writer)
        with os.fdopen(reader, "rb") as f:
            self.result = f.readline().decode().strip()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_folder_can_be_opened_again_while_a_forked_child_lives(tmp_path):
    receiver = codec.WeightReceiver(weights(), folder=tmp_path)
    with Child():
        receiver.close()
        codec.WeightReceiver(folder=tmp_path).close()


def test_folder_can_be_opened_after_its_process_was_killed_while_a_child_lives(tmp_path):
    def parent():
        receiver = codec.WeightReceiver(weights(), folder=tmp_path)
        child = Child()
        assert receiver.version == 0
        return child.pid

    killed = Child(parent)
    with killed:
        pass
    try:
        codec.WeightReceiver(folder=tmp_path).close()
    finally:
        os.kill(int(killed.result), signal.SIGKILL)


def test_forked_child_cannot_use_or_unlock_the_folder_of_its_parent(tmp_path):
    receiver = codec.WeightReceiver(weights(), folder=tmp_path)
    update = codec.WeightSender(weights()).diff(stepped(weights(), 1))

    def use():
        with pytest.raises(codec.StateError, match="forked"):
            receiver.apply(update)
        with pytest.raises(codec.StateError, match="forked"):
            dict(receiver.tensors())
        receiver.close()
        return "refused"

    with Child(use) as child:
        assert child.result == "'refused'"
    with pytest.raises(codec.StateError, match="in use by another"):
        codec.WeightReceiver(folder=tmp_path)
    receiver.apply(update)
    assert equal(stepped(weights(), 1), receiver.tensors())
    receiver.close()


def test_forked_child_has_a_copy_of_weights_in_memory():
    receiver = codec.WeightReceiver(weights())
    update = codec.WeightSender(weights()).diff(stepped(weights(), 1))

    def use():
        receiver.apply(update)
        return receiver.version

    with receiver._base.lock, Child(use) as child:
        assert child.result == "1"
    assert receiver.version == 0
    assert np.array_equal(dict(receiver.tensors())["model.step"], weights()["model.step"])
