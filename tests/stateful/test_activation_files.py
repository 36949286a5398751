"""Stores in files hold the same m as stores in memory; after damage or a crash, each m is correct or missing."""

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec.__main__ import main
from support.activations import differing, m_of
from support.processes import run
from support.states import seeds, through_npz
from support.tiers import HANG_SECONDS, N_DAMAGED, nightly

ENTRIES = ("float32", "bfloat16", "8bit")
SAMPLES = list(range(4))
A = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)


def side(folder, **arguments):
    return codec.ActivationDelta(store=folder, **arguments)


def step(sender, receiver, a, samples, commit=True):
    """Send activations, repeating a refused message raw; return the received activations."""
    try:
        received = receiver.decode(sender.encode(a, samples), samples)
    except codec.StateError:
        sender.rollback()
        receiver.rollback()
        sender.forget(samples)
        received = receiver.decode(sender.encode(a, samples), samples)
    for s in (sender, receiver):
        s.commit() if commit else s.rollback()
    return received


@given(st.sampled_from(ENTRIES), st.sampled_from([None, 4000]), seeds)
def test_files_hold_the_same_m_as_memory(tmp_path_factory, entries, budget, seed):
    """m in files equals m in memory, through commits, rollbacks, forgotten and prefetched samples, and reopening."""
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("store")
    arguments = {"dtype": entries, "budget": budget, "edge": 3}
    in_memory, receiver, in_files = (codec.ActivationDelta(**arguments) for _ in range(3))
    in_files = side(folder, **arguments)
    for _ in range(int(rng.integers(1, 8))):
        n = int(rng.choice([5, 300]))
        samples = rng.integers(0, 8, int(rng.integers(1, 6))).tolist()
        if rng.random() < 0.5:
            in_files.prefetch(rng.integers(0, 8, 3).tolist())
        a = rng.standard_normal((len(samples), n)).astype(np.float32)
        if rng.random() < 0.1:
            a[0, 0] = np.nan
        message = in_memory.encode(a, samples)
        received = receiver.decode(message)
        np.testing.assert_equal(in_files.decode(message), received)
        action = rng.choice(["commit", "commit", "rollback", "forget", "reopen"])
        for s in (in_memory, receiver, in_files):
            s.rollback() if action == "rollback" else s.commit()
            if action == "forget":
                s.forget(samples[:2])
        if action == "reopen":
            in_files.close()
            in_files = side(folder, **arguments)
        np.testing.assert_equal(m_of(in_files), m_of(receiver))
        assert in_files.checks(range(8)).tolist() == receiver.checks(range(8)).tolist()
        assert in_files.stats().entries_nbytes == receiver.stats().entries_nbytes
    in_files.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("entries", ENTRIES)
def test_reopened_files_continue_with_deltas(tmp_path, entries):
    sender, receiver = (side(tmp_path / name, dtype=entries) for name in "ab")
    step(sender, receiver, A, SAMPLES)
    before = m_of(sender)
    for s in (sender, receiver):
        s.close()
    sender, receiver = (side(tmp_path / name, dtype=entries) for name in "ab")
    np.testing.assert_equal(m_of(sender), before)
    step(sender, receiver, A + 0.1, SAMPLES)
    assert sender.stats().delta_samples == receiver.stats().delta_samples == 4


def test_collected_object_has_written_its_files(tmp_path):
    sender = side(tmp_path)
    sender.encode(A, SAMPLES)
    sender.commit()
    del sender
    gc.collect()
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        try:
            assert side(tmp_path).known(SAMPLES).all()
            break
        except codec.StateError:  # not yet possible: the store's thread is still writing
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_interpreter_that_exits_has_written_its_files(tmp_path):
    run(f"""
delta = codec.ActivationDelta(store={str(tmp_path)!r})
delta.encode(np.ones((100, 50_000), np.float32), range(100))
delta.commit()
print("the end")
""")
    assert side(tmp_path).known(range(100)).all()
    assert all((m == 1).all() for m in m_of(side_copy(tmp_path)).values())


def side_copy(folder):
    """Copy a folder, which may be in use, and open the copy."""
    copy = folder.with_name(f"{folder.name} copy {random.random()}")
    shutil.copytree(folder, copy)
    return side(copy)


def test_damaged_entries_are_forgotten_and_healed(tmp_path):
    """A changed byte of a file loses at most one sample, which is then sent raw; all other m are correct."""
    sender, receiver = side(tmp_path / "a"), codec.ActivationDelta()
    step(sender, receiver, A, SAMPLES)
    expected = m_of(sender)
    sender.close()
    (file,) = (tmp_path / "a").glob("*.slots")
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    lost = 0
    for _ in range(N_DAMAGED):
        bad = bytearray(whole)
        bad[rng.integers(4096, len(bad))] ^= 1 << rng.integers(8)
        file.write_bytes(bad)
        sender = side(tmp_path / "a")
        a = A + np.float32(0.01)
        message = sender.encode(a, SAMPLES)
        raw = 4 - sender.stats().delta_samples
        assert raw <= 1
        lost += raw
        for sample in sender.known(SAMPLES).nonzero()[0]:
            np.testing.assert_equal(m_of(sender)[sample], expected[sample])
        np.testing.assert_allclose(receiver.decode(message), a, atol=0.03)
        receiver.rollback()
        sender.close()
    assert lost > N_DAMAGED / 2


def test_receiver_with_a_damaged_entry_refuses_the_delta(tmp_path):
    sender, receiver = codec.ActivationDelta(), side(tmp_path)
    step(sender, receiver, A, SAMPLES)
    receiver.flush()
    (file,) = tmp_path.glob("*.slots")
    with file.open("r+b") as f:
        f.seek(4096 + 100)
        f.write(b"damaged!")
    with pytest.raises(codec.StateError, match="this side lacks, or has") as caught:
        receiver.decode(sender.encode(A, SAMPLES))
    assert len(caught.value.item) == 1
    assert receiver.stats().damaged == 1
    sender.rollback()
    step(sender, receiver, A, SAMPLES)
    assert differing(sender, receiver) == []


@pytest.mark.parametrize("length", [0, 10, 4096, 5000, 7000])
def test_truncated_file_loses_its_end_only(tmp_path, length):
    sender, receiver = side(tmp_path), codec.ActivationDelta()
    step(sender, receiver, A, SAMPLES)
    sender.close()
    (file,) = tmp_path.glob("*.slots")
    os.truncate(file, length)
    sender = side(tmp_path)
    step(sender, receiver, A + 0.1, SAMPLES)
    assert sender.stats().delta_samples == receiver.stats().delta_samples == max(0, length - 4096) // 1280
    assert differing(sender, receiver) == []


def test_file_that_shrinks_while_it_is_open_is_no_crash(tmp_path):
    """A file that shrinks while open is an error, not a crash by SIGBUS as with mapped memory."""
    sender, receiver = side(tmp_path), codec.ActivationDelta()
    step(sender, receiver, A, SAMPLES)
    sender.flush()
    (file,) = tmp_path.glob("*.slots")
    os.truncate(file, 4096)
    step(sender, receiver, A + 0.1, SAMPLES)
    assert sender.stats().damaged == 4
    assert differing(sender, receiver) == []


def test_damaged_head_of_a_file_loses_the_file_only(tmp_path):
    sender, receiver = side(tmp_path), codec.ActivationDelta()
    step(sender, receiver, A, SAMPLES)
    step(sender, receiver, A[:, :70], range(10, 14))
    sender.close()
    with (tmp_path / "300.slots").open("r+b") as f:
        f.seek(16)
        f.write(b"\xff")
    sender = side(tmp_path)
    assert sender.known([*SAMPLES, *range(10, 14)]).tolist() == [False] * 4 + [True] * 4
    step(sender, receiver, A, SAMPLES)
    assert differing(sender, receiver) == []


def test_folders_of_something_else_are_errors(tmp_path):
    first = side(tmp_path / "a", edge=1)
    with pytest.raises(codec.StateError, match="in use"):
        side(tmp_path / "a", edge=1)
    step(first, codec.ActivationDelta(edge=1), A, SAMPLES)
    first.close()
    for arguments in ({"edge": 2}, {"edge": 1, "dtype": "bfloat16"}):
        with pytest.raises(codec.StateError, match="another edge"):
            side(tmp_path / "a", **arguments)
    assert side(tmp_path / "a", edge=1).known(SAMPLES).all()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "300.slots").write_bytes(b"mine" * 2000)
    with pytest.raises(codec.StateError, match="not a file of activations"):
        side(tmp_path / "b")
    assert (tmp_path / "b" / "300.slots").read_bytes() == b"mine" * 2000
    (tmp_path / "file").write_bytes(b"")
    for store in (tmp_path / "file", "/dev/null/x", "a\0b"):
        with pytest.raises(codec.ArgumentError, match="store="):
            side(store)
    for store in (None, 5, ["ram"]):
        with pytest.raises(codec.ArgumentError, match="store must be"):
            side(store)


def test_disk_that_is_full_makes_samples_raw(tmp_path):
    """If the disk is full (here after 3 of 8 entries), samples are sent raw."""
    run(
        f"""
sender, receiver = codec.ActivationDelta(store={str(tmp_path)!r}), codec.ActivationDelta()
a = normal(80_000).reshape(8, 10_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 3 * 45_056, 4096 + 3 * 45_056))
for visit in range(3):
    np.testing.assert_allclose(receiver.decode(sender.encode(a, range(8))), a, atol=0.05)
    sender.commit()
    receiver.commit()
    sender._ledger.store._settle(0)
stats = sender.stats()
assert (stats.raw_samples, stats.delta_samples, stats.damaged) == (18, 6, 10), stats
print("the end")
""",
        noise=("stored activations in",),
    )


def test_state_dict_of_files_has_checks_only(tmp_path):
    sender, receiver = side(tmp_path), codec.ActivationDelta()
    step(sender, receiver, A, SAMPLES)
    saved = through_npz(sender.state_dict())
    expected = m_of(sender)
    step(sender, receiver, A[:2] + 1, [0, 1])
    sender.close()
    sender = side(tmp_path)
    sender.load_state_dict(saved)
    np.testing.assert_equal(m_of(sender), {s: expected[s] for s in (2, 3)})
    with pytest.raises(codec.StateError, match="with their folder as store="):
        receiver.load_state_dict(saved)
    sender.load_state_dict(receiver.state_dict())
    sender.close()
    np.testing.assert_equal(m_of(side(tmp_path)), m_of(receiver))


def test_use_after_fork_is_an_error(tmp_path):
    run(
        f"""
delta = codec.ActivationDelta(store={str(tmp_path)!r})
delta.encode(np.ones((2, 50), np.float32), range(2))
if (child := os.fork()) == 0:
    try:
        delta.commit()
    except codec.StateError as e:
        assert "fork" in str(e)
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
delta.commit()
delta.close()
assert codec.ActivationDelta(store={str(tmp_path)!r}).known(range(2)).all()
print("the end")
""",
        noise=("<string>", "  ", ""),
    )


# Child process with both sides of an edge. The seed determines all activations, so the test knows every committed m.
TRAINING = """
import sys
import numpy as np
import codec
from codec.__main__ import main

def train(sender, receiver, steps, visit=lambda *_: None):
    rng = np.random.default_rng(0)
    for i in range(steps):
        samples = rng.choice(12, 4, replace=False).tolist()
        a = rng.standard_normal((4, 5000)).astype(np.float32)
        receiver.decode(sender.encode(a, samples))
        sender.commit()
        receiver.commit()
        visit(i)
"""
CHILD = (
    TRAINING
    + """
sides = [codec.ActivationDelta(store=f, dtype=sys.argv[1]) for f in sys.argv[2:]]
print("ready", flush=True)
train(*sides, 1 << 40, lambda i: print(i, flush=True))
"""
)


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("rounds", [3, nightly(30)])
def test_killed_process_leaves_right_entries(tmp_path, entries, rounds):
    """After SIGKILL at a random time, each entry in the files is an m that was committed, with its checksum."""
    generator = random.Random(0)
    space = {}
    exec(TRAINING, space)
    for round_number in range(rounds):
        folders = [tmp_path / f"{round_number}{name}" for name in "ab"]
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, entries, *map(str, folders)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "ready\n"
        time.sleep(generator.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        steps = 1 + max([-1, *(int(line) for line in child.stdout.read().splitlines() if line)])
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL

        right = {}
        sides = [codec.ActivationDelta(dtype=entries) for _ in range(2)]

        def record(_, sides=sides, right=right):
            for sample, m in m_of(sides[0]).items():
                right[sample, sides[0].checks([sample]).item()] = m

        space["train"](*sides, steps + 2, record)
        found = 0
        for folder in folders:
            reopened = side(folder, dtype=entries)
            for sample, entry in list(reopened._ledger.entries.items()):
                m = np.empty((1, entry.n), np.float32)
                if not reopened._ledger.gather([sample], m):
                    found += 1
                    np.testing.assert_equal(m[0], right[sample, entry.check])
            reopened.close()
        assert found >= 1 or steps < 10
        sides = [side(folder, dtype=entries) for folder in folders]
        a = np.ones((12, 5000), np.float32)
        step(*sides, a, range(12))
        assert differing(*sides) == []
        for s in sides:
            s.close()


def test_inspection_counts_samples_and_damage(tmp_path, capsys):
    delta = side(tmp_path, edge=9, dtype="bfloat16")
    step(delta, codec.ActivationDelta(edge=9, dtype="bfloat16"), A, SAMPLES)
    step(delta, codec.ActivationDelta(edge=9, dtype="bfloat16"), A[:1, :70], [8])
    delta.flush()
    info = codec.ActivationDelta.inspect_store(tmp_path, verify=True)
    assert (info.edge, info.dtype, info.samples, info.values) == (9, "bfloat16", 5, (70, 300))
    assert (info.nbytes, info.visits, info.damaged) == (4 * 600 + 140, 0, 0)
    assert codec.ActivationDelta.inspect_store(str(tmp_path)).damaged is None
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 5
    assert main(["verify", str(tmp_path)]) == 0
    with (tmp_path / "300.slots").open("r+b") as f:
        f.seek(4096 + 100)
        f.write(b"damaged!")
    assert codec.ActivationDelta.inspect_store(tmp_path, verify=True).damaged == 1
    assert main(["verify", str(tmp_path)]) == 1
    assert "1 of 5 samples are damaged" in capsys.readouterr().err


def test_inspection_of_something_else_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "none", tmp_path / "a\0b", 5, None):
        with pytest.raises(codec.ArgumentError):
            codec.ActivationDelta.inspect_store(folder)
    for text in (b"", b"CODS" + bytes(5000), b"mine" * 2000):
        (tmp_path / "300.slots").write_bytes(text)
        with pytest.raises(codec.StateError, match="not a file of activations"):
            codec.ActivationDelta.inspect_store(tmp_path)
