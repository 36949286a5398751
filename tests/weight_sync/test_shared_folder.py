"""Receivers of several processes share the weights in a folder, and each has a version of its own."""

import multiprocessing
import os
import signal

import numpy as np
import pytest

import codec
from codec.weight_sync import Publisher, pull
from codec.weight_sync.store.source import StoreReader
from support.processes import run
from support.tiers import NIGHTLY
from support.weight_updates import equal, stepped, versions, weights

# A child process opens the folder beside a receiver of the parent, and applies an update. The child is killed at a
# given line of the modules that write. The receiver of the parent, and the next one, then use the folder.
# Likewise, a receiver is interrupted at a given line, after which neither this nor another one may wait for a lock.
KILLED = """
import contextlib, shutil, tempfile
sys.path.insert(0, {tests!r})
from support.fault_lines import at_line, raising
from support.weight_updates import equal, versions

FOLDERS = "bases/shared_folder.py", "bases/folder.py"

all_weights, updates = versions(3)
root = tempfile.mkdtemp()
codec.WeightReceiver(all_weights[0], folder=root + "/first", shared=True).close()

def opened(folder):
    return codec.WeightReceiver(folder=folder, shared=True)

def attempt(point):
    folder = f"{{root}}/{{point}}"
    shutil.copytree(root + "/first", folder)
    other = opened(folder)
    child = os.fork()
    if child == 0:
        with at_line(point, lambda: os.kill(os.getpid(), signal.SIGKILL), "bases/base.py", *FOLDERS):
            opened(folder).apply(updates[0])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert (other.version, equal(all_weights[0], other.tensors())) == (0, True), point
    with opened(folder) as third:
        found = third.version
        assert found in (0, 1) and equal(all_weights[found], third.tensors()), (point, found)
        other.apply(updates[0])
        other.apply(updates[1])
        assert equal(all_weights[2], other.tensors()), point
        assert equal(all_weights[found], third.tensors()), point
        left = sorted(os.listdir(folder))
        assert len(left) == 5 and not [n for n in left if "staged" in n], (point, left)
    other.close()
    with opened(folder) as last:
        assert (last.version, equal(all_weights[2], last.tensors())) == (2, True), point
        assert len(os.listdir(folder)) == 5, (point, os.listdir(folder))
    shutil.rmtree(folder)
    return os.WIFSIGNALED(status), found

def interrupted(point):
    folder = tempfile.mkdtemp(dir=root)
    with codec.WeightReceiver(all_weights[0], folder=folder, shared=True) as first, opened(folder) as other:
        program = dict(first.tensors())
        signal.alarm(60)
        with contextlib.suppress(KeyboardInterrupt), at_line(point, raising(KeyboardInterrupt), *FOLDERS) as lines:
            first.apply(updates[0], program.update)
        assert first.unloaded or equal(all_weights[first.version], program), point
        assert equal(all_weights[first.version], first.tensors()), point
        other.apply(updates[0])
        if first.version == 0:
            first.apply(updates[0])
        for receiver in (first, other):
            receiver.apply(updates[1], program.update)
            assert equal(all_weights[2], receiver.tensors()), point
        assert equal(all_weights[2], program)
        assert len(os.listdir(folder)) == 5, (point, os.listdir(folder))
    signal.alarm(0)
    return lines.count > point

point = 3
while interrupted(point):
    point += {step}

results, point = set(), 1
while (done := attempt(point))[0]:
    results.add(done[1])
    point += {step}
assert results == {{0, 1}}, results
shutil.rmtree(root)
print("the end")
"""


def test_receiver_killed_or_interrupted_at_any_point_leaves_the_others_their_versions():
    code = KILLED.format(tests=os.path.dirname(os.path.dirname(__file__)), step=3 if NIGHTLY else 23)
    run(code, noise=("<string>:", "  child = os.fork()"), CODEC_NUM_THREADS="1")


def opened(folder, **how):
    return codec.WeightReceiver(folder=folder, shared=True, **how)


@pytest.fixture
def two(tmp_path):
    """Return two receivers that share a folder with version 0, and the versions and updates."""
    all_weights, updates = versions(4)
    first = codec.WeightReceiver(all_weights[0], folder=tmp_path, shared=True)
    second = opened(tmp_path)
    second.reload(dict)
    yield first, second, all_weights, updates
    first.close()
    second.close()


def worker(pipe, source, folder):
    """Pull each time the parent asks, and report the version, the number of updates read, and equality to `pipe`."""
    all_weights, program, reads = versions(3)[0], {}, []
    original = StoreReader.update
    StoreReader.update = lambda self, one, *known: reads.append(one) or original(self, one, *known)
    receiver = opened(folder)
    while pipe.recv():
        reads.clear()
        version = pull(receiver, source, program.update)
        same = equal(all_weights[version], program) and equal(all_weights[version], receiver.tensors())
        pipe.send((version, len(reads), same and not receiver.unloaded))


def test_processes_read_and_decode_each_update_once(tmp_path):
    """Three processes pull at the same time; one of them is killed, and another one joins."""
    context = multiprocessing.get_context("fork")
    with Publisher(tmp_path / "store", host="127.0.0.1") as publisher:

        def start():
            mine, other = context.Pipe()
            process = context.Process(target=worker, args=(other, publisher.source, tmp_path / "weights"))
            process.start()
            other.close()
            return process, mine

        workers = [start() for _ in range(3)]
        for step, new in enumerate(versions(3)[0]):
            publisher.publish(new)
            if step == 2:
                workers[0][0].kill()
                workers[0][0].join()
                workers[0] = start()
            for _, pipe in workers:
                pipe.send(True)
            found = [pipe.recv() for _, pipe in workers]
            assert [(version, same) for version, _, same in found] == [(step, True)] * 3
            assert sum(reads for _, reads, _ in found) == 1
        for process, pipe in workers:
            pipe.send(False)
            process.join()
            assert process.exitcode == 0


def test_slow_receiver_reads_the_version_that_it_has(two):
    slow, fast, all_weights, updates = two
    tensors = slow.tensors()
    first = dict([next(tensors)])
    for update in updates:
        fast.apply(update)
    assert equal(all_weights[0], first | dict(tensors))
    assert slow.version == 0
    for update in updates:
        slow.apply(update)
    assert equal(all_weights[3], slow.tensors())


def test_receiver_that_commits_late_does_not_take_the_folder_back(two, tmp_path):
    late, fast, all_weights, updates = two
    late.stage(updates[0])
    loaded = dict(late.updated(all_weights[1]))
    for update in updates:
        fast.apply(update)
    late.commit()
    assert (late.version, late.unloaded) == (1, frozenset())
    assert equal(all_weights[1], loaded)
    assert equal(all_weights[1], late.tensors())
    with opened(tmp_path) as third:
        assert equal(all_weights[3], third.tensors())


def test_failed_load_keeps_the_old_version_of_one_receiver_only(two):
    failing, other, all_weights, updates = two
    program = {name: x.copy() for name, x in all_weights[0].items()}

    def load(tensors):
        for k, (name, x) in enumerate(tensors):
            if k == 2 and failing.staged:
                raise MemoryError
            program[name] = x

    other.apply(updates[0])
    with pytest.raises(MemoryError):
        failing.apply(updates[0], load)
    assert (failing.version, other.version) == (0, 1)
    assert equal(all_weights[0], program)
    failing.apply(updates[0], into=program)
    assert equal(all_weights[1], program)


def test_two_phases_of_one_receiver_take_the_values_of_the_other(two, tmp_path, monkeypatch):
    """A tensor parallel server: all workers check an update, then all load it. Frames are decoded once."""
    first, second, all_weights, updates = two
    first.stage(updates[0])
    monkeypatch.setattr(codec.weight_sync.bases.base, "decode_delta", None)
    second.stage(updates[0])
    assert (first.version, second.version) == (0, 0)
    for receiver in (second, first):
        changed = dict(receiver.updated())
        assert equal(all_weights[0] | changed, all_weights[1])
        receiver.commit()
        assert (receiver.version, receiver.unloaded) == (1, frozenset())
    assert len(list(tmp_path.glob("values-*"))) == 1


def test_pull_goes_to_the_last_version_that_another_receiver_has_stored(tmp_path):
    """A receiver behind its neighbours reads no update, and gets the tensors that differ."""
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(weights())
        ahead, behind = opened(tmp_path / "weights"), opened(tmp_path / "weights")
        program = {}
        pull(ahead, publisher.source)
        pull(behind, publisher.source, program.update)
        last, changed = weights(), "model.layers.0.norm.weight"
        for seed in (1, 2):
            last = {**last, changed: stepped(last, seed)[changed]}
            publisher.publish(last)
            pull(ahead, publisher.source)
        before, seen = dict(program), []
        assert pull(behind, publisher.source, program.update, progress=seen.append) == 2
        assert [(update.version, list(update.tensors), update.nbytes) for update in seen] == [(2, [changed], 0)]
        assert equal(last, program)
        assert [name for name, x in program.items() if x is not before[name]] == [changed]
        ahead.close()
        behind.close()
        with opened(tmp_path / "weights", max_nbytes=100) as small:
            publisher.publish(stepped(last, 3))
            pull(ahead := opened(tmp_path / "weights"), publisher.source)
            with pytest.raises(codec.LimitError):
                pull(small, publisher.source)
            assert (ahead.version, small.version) == (3, 2)
            ahead.close()


def test_snapshot_of_a_new_run_replaces_the_weights_of_all_receivers(two):
    first, second, all_weights, _ = two
    new = {"other": np.arange(7, dtype=np.float32)}
    snapshot = codec.WeightSender(new).snapshot()
    program = dict(all_weights[0])
    first.apply(snapshot, restart=True)
    second.apply(snapshot, lambda tensors: program.clear() or program.update(tensors), restart=True)
    assert equal(new, first.tensors())
    assert equal(new, program)
    assert second.run == first.run


def test_damaged_or_unfit_update_leaves_no_file(two, tmp_path):
    first, _, all_weights, updates = two
    damaged = bytearray(updates[0])
    damaged[-1] ^= 1
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(codec.FrameError):
        first.stage(damaged)
    with pytest.raises(codec.StateError, match="needs version 1"):
        first.stage(updates[1])
    with opened(tmp_path / "small", max_nbytes=100) as small, pytest.raises(codec.LimitError):
        small.apply(codec.WeightSender(all_weights[0]).snapshot())
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "small"])


def test_discarded_values_are_deleted(two, tmp_path):
    first, second, all_weights, updates = two
    first.stage(updates[0])
    first.discard()
    second.stage(codec.WeightSender(all_weights[0], version=8).snapshot(), restart=True)
    assert len(list(tmp_path.glob("staged-*"))) == 1
    assert len(list(tmp_path.glob("values-*"))) == 2


def test_private_and_shared_receivers_exclude_each_other(tmp_path):
    with (
        codec.WeightReceiver(weights(), folder=tmp_path),
        pytest.raises(codec.StateError, match="shared=True to all receivers"),
    ):
        opened(tmp_path)
    with opened(tmp_path) as first:
        with pytest.raises(codec.StateError, match="in use by another"):
            codec.WeightReceiver(folder=tmp_path)
        with opened(tmp_path) as second:
            first.close()
            with pytest.raises(codec.StateError, match="in use by another"):
                codec.WeightSender(folder=tmp_path)
            assert equal(weights(), second.tensors())
    with codec.WeightReceiver(folder=tmp_path) as private:
        assert equal(weights(), private.tensors())
    with pytest.raises(codec.StateError, match="already holds version 0"):
        codec.WeightReceiver(weights(), folder=tmp_path, shared=True)
    with pytest.raises(codec.ArgumentError, match="needs folder="):
        codec.WeightReceiver(shared=True)


def test_receivers_of_a_folder_need_the_same_machine_user_and_key(tmp_path):
    with opened(tmp_path, verify=b"a" * 16):
        opened(tmp_path, verify=b"a" * 16).close()
        for key in (None, b"b" * 16):
            with pytest.raises(codec.StateError, match="pass the same verify="):
                opened(tmp_path, verify=key)
    with opened(tmp_path, verify=b"b" * 16):
        content = (tmp_path / "lock").read_bytes()
        (tmp_path / "lock").write_bytes(b"other" + content)
        with pytest.raises(codec.StateError, match="in use on another machine"):
            opened(tmp_path, verify=b"b" * 16)
    if os.geteuid() == 0:
        os.chown(tmp_path / "lock", 12345, -1)
        with pytest.raises(codec.StateError, match="belongs to user 12345"):
            opened(tmp_path)


def test_first_receiver_checks_the_values_and_completes_a_killed_update(tmp_path):
    all_weights, updates = versions(2)
    private = codec.WeightReceiver(all_weights[0], folder=tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

    def killed(*args):
        raise SystemExit

    private._base.complete = killed
    with pytest.raises(SystemExit):
        private.apply(updates[0])
    private._base.close()  # stands for the end of the process
    with opened(tmp_path) as receiver:
        assert equal(all_weights[1], receiver.tensors())
    [values] = tmp_path.glob("values-*")
    data = bytearray(values.read_bytes())
    data[40] ^= 1
    values.write_bytes(data)
    with pytest.raises(codec.StateError, match="Start from an empty folder"):
        opened(tmp_path)


def test_wait_for_another_receiver_can_be_interrupted(two):
    first, second, all_weights, updates = two

    def interrupt(*_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with first._base.preparing():
            # again and again: a signal just before the system call does not end it
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with pytest.raises(KeyboardInterrupt):
                second.apply(updates[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert second.version == 0
    second.apply(updates[0])
    assert equal(all_weights[1], second.tensors())


def test_forked_child_cannot_use_the_shared_folder(two):
    first, second, all_weights, updates = two
    first.stage(updates[0])
    child = os.fork()
    if child == 0:
        try:
            first.commit()
        except codec.StateError as e:
            first.close()
            os._exit("forked" in str(e))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    first.commit()
    second.apply(updates[0])
    assert equal(all_weights[1], second.tensors())
