"""Activation folders with files that ActivationDelta did not write give one error, or a missing entry."""

import os

import numpy as np
import pytest

import codec
from codec.stateful.activation.slots import SlotFile
from support.processes import run

A = np.random.default_rng(0).standard_normal((2, 500)).astype(np.float32)
LARGE = 1 << 40  # bytes of a sparse file: scanning all its slots would take hours


def folder(path, dtype="float32"):
    """Create a folder that stores m of two samples."""
    delta = codec.ActivationDelta(store=path, dtype=dtype)
    delta.encode(A, [7, 11])
    delta.commit()
    delta.close()
    return path


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_files_that_are_not_regular_are_errors(tmp_path, kind):
    folder(tmp_path)
    odd = tmp_path / "600.slots"
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](odd)
    with pytest.raises(codec.CodecError, match=r"not a regular file|cannot be read"):
        codec.ActivationDelta.inspect_store(tmp_path)
    with pytest.raises(codec.CodecError, match=r"not a regular file|directory"):
        codec.ActivationDelta(store=tmp_path)
    odd.rmdir() if kind == "folder" else odd.unlink()
    assert codec.ActivationDelta(store=tmp_path).known([7, 11]).all()


def test_sparse_file_is_read_where_it_has_data(tmp_path):
    file = folder(tmp_path) / "500.slots"
    size = file.stat().st_size
    os.truncate(file, LARGE)
    assert codec.ActivationDelta.inspect_store(tmp_path, verify=True).samples == 2
    delta = codec.ActivationDelta(store=tmp_path)
    assert delta.known([7, 11]).all()
    delta.encode(A, [3, 4])
    delta.commit()
    delta.close()
    assert file.stat().st_size == LARGE
    # New entries were appended after the old ones: the file is still sparse
    assert file.stat().st_blocks * 512 < size + 100_000
    assert codec.ActivationDelta.inspect_store(tmp_path, verify=True).samples == 4


def test_entry_behind_a_hole_is_found(tmp_path):
    path = folder(tmp_path) / "500.slots"
    file = SlotFile(path, "float32", 0, 500)
    file.write(1 << 22, 5, 99, 0, A[0].view(np.uint8))
    file.close()
    delta = codec.ActivationDelta(store=tmp_path)
    assert delta.known([7, 11, 5]).all()
    delta.close()


def test_sparse_file_of_large_entries_takes_no_memory(tmp_path):
    """A sparse file whose header declares samples of 1 TiB, with an entry of that size, takes no memory."""
    n = 1 << 38
    file = SlotFile(tmp_path / f"{n}.slots", "float32", 0, n)
    file.write(0, 5, 99, 0, A[0].view(np.uint8))
    file.close()
    os.truncate(tmp_path / f"{n}.slots", 2 * LARGE)
    run(
        f"""
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
assert codec.ActivationDelta.inspect_store({str(tmp_path)!r}, verify=True).damaged == 1
print("the end")
"""
    )


def test_names_that_are_no_number_of_values_are_ignored(tmp_path):
    folder(tmp_path)
    for name in ("9" * 25, f"{(1 << 48) + 1}", "0", "0500", "-5", "+5", " 5", "\u0663", "5\n"):
        (tmp_path / f"{name}.slots").write_bytes(b"mine")
    assert codec.ActivationDelta.inspect_store(tmp_path).values == (500,)
    delta = codec.ActivationDelta(store=tmp_path)
    assert delta.known([7, 11]).all()
    delta.close()
    assert (tmp_path / "0500.slots").read_bytes() == b"mine"


@pytest.mark.parametrize("length", range(1, 6))
def test_file_that_ends_in_its_first_bytes_is_begun_anew(tmp_path, length):
    file = folder(tmp_path) / "500.slots"
    os.truncate(file, length)
    with pytest.raises(codec.StateError, match="head is damaged"):
        codec.ActivationDelta.inspect_store(tmp_path)
    delta = codec.ActivationDelta(store=tmp_path)
    delta.encode(A, [7, 11])
    delta.commit()
    delta.close()
    assert codec.ActivationDelta.inspect_store(tmp_path, verify=True).damaged == 0
    file.write_bytes(b"mine"[:length])
    with pytest.raises(codec.StateError, match="is not a file of activations"):
        codec.ActivationDelta(store=tmp_path)
    assert file.read_bytes() == b"mine"[:length]


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("float32", 0),
        ("float32", 4),
        ("float32", 1996),
        ("bfloat16", 2),
        ("bfloat16", 4),
        ("bfloat16", 998),
        ("8bit", 10),
    ],
)
def test_entry_of_another_size_is_forgotten(tmp_path, dtype, nbytes):
    """An entry of another size with valid checksums is dropped; memory after the entry is never read as m."""
    file = SlotFile(folder(tmp_path, dtype) / "500.slots", dtype, 0, 500)
    slot, head = next((s, h) for s, h in file.heads() if h and h.sample == 7)
    file.write(slot, 7, head.check, 0, np.full(nbytes, 65, np.uint8))
    file.close()
    _check_forgotten(tmp_path, dtype)


@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Quantize(8), codec.Float8()])
def test_entry_of_another_codec_is_damage(tmp_path, spec):
    file = SlotFile(folder(tmp_path, "8bit") / "500.slots", "8bit", 0, 500)
    slot, head = next((s, h) for s, h in file.heads() if h and h.sample == 7)
    frame = codec.encode(np.zeros(500, np.float32), spec)
    file.write(slot, 7, head.check, 0, np.frombuffer(frame, np.uint8))
    file.close()
    assert codec.ActivationDelta.inspect_store(tmp_path, verify=True).damaged == 1


def _check_forgotten(path, dtype):
    assert codec.ActivationDelta.inspect_store(path, verify=True).damaged == 1
    sender, receiver = codec.ActivationDelta(store=path, dtype=dtype), codec.ActivationDelta(dtype=dtype)
    np.testing.assert_allclose(receiver.decode(sender.encode(A[:1], [7])), A[:1], atol=0.05)
    assert sender.stats().damaged == sender.stats().raw_samples == 1
    sender.close()


def test_use_after_close_is_an_error(tmp_path):
    """Using a closed object is an error, which leaves the folder, possibly opened by another object, unchanged."""
    delta = codec.ActivationDelta(store=folder(tmp_path))
    delta.close()
    delta.close()
    other = codec.ActivationDelta(store=tmp_path)
    delta.encode(A[:, :300], [1, 2])
    for call in (
        lambda: delta.encode(A, [7, 11]),
        delta.commit,
        delta.flush,
        delta.state_dict,
        lambda: delta.prefetch([7]),
        lambda: delta.forget([7]),
    ):
        with pytest.raises(codec.StateError, match="is closed"):
            call()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["500.slots", "lock"]
    assert other.known([7, 11]).all()
    other.close()
