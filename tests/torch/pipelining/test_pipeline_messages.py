"""Pipeline messages and reports have the bytes of docs/spec/protocol/point-to-point.md; damaged ones are refused."""

import json
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
from codec.torch.pipelining.end import Aborted
from codec.torch.pipelining.envelope import MessageKind, Place, envelope_nbytes, pack, unpack
from codec.torch.pipelining.notes import Notes, report_of
from support.tiers import N_EXAMPLES

PARTS = [b"activation", b"", b"mask" * 9]
SHAPES = [(2, 5), (), (9, 1, 1 << 40)]
PLACE = Place(3, 1 << 40)
WHOLE = pack(MessageKind.GRADIENTS, PLACE, SHAPES, PARTS)
ENVELOPE = 24 + 3 * 16 + 5 * 8  # size in bytes: header, three records, five dimensions


def read(message):
    return unpack(message, MessageKind.GRADIENTS, PLACE, len(PARTS))


def test_message_has_the_specified_bytes():
    records = b"".join(
        struct.pack(f"<{2 + len(shape)}Q", len(part), len(shape), *shape)
        for part, shape in zip(PARTS, SHAPES, strict=True)
    )
    start = b"CDPL" + struct.pack("<BBHIQ", 1, 1, 3, 3, 1 << 40)
    crc = zlib.crc32(start + bytes(4) + records)
    assert start + struct.pack("<I", crc) + records + b"".join(PARTS) == WHOLE
    assert envelope_nbytes(SHAPES) == len(start + records) + 4 == ENVELOPE
    found = read(WHOLE)
    assert found.shapes == SHAPES
    assert list(map(bytes, found.parts)) == PARTS


def test_aborted_message_has_no_parts():
    message = pack(MessageKind.ABORTED, PLACE, SHAPES)
    assert len(message) == ENVELOPE
    assert read(message) == (SHAPES, None)
    with pytest.raises(codec.StateError, match="run the same schedule"):
        unpack(message, MessageKind.GRADIENTS, Place(4, PLACE.run), 3)


@given(st.integers(0, 8 * ENVELOPE - 1))
@settings(max_examples=N_EXAMPLES, deadline=None)
def test_flipped_bit_of_the_envelope_is_refused(bit):
    changed = bytearray(WHOLE)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(codec.FrameError):
        read(bytes(changed))


@given(st.binary(max_size=100) | st.integers(0, len(WHOLE) - 1).map(lambda n: WHOLE[:n]))
@settings(max_examples=N_EXAMPLES, deadline=None)
def test_other_bytes_are_refused(message):
    with pytest.raises(codec.FrameError):
        read(message)


@pytest.mark.parametrize("sizes", [(1 << 63, 0, 0), (11, 0, 36), (9, 0, 36), (10, 0, 35)])
def test_sizes_that_do_not_fit_the_message_are_refused(sizes):
    """A message with valid checksums is refused if the sizes in its envelope do not match its length."""
    start = WHOLE[:20]
    table = b"".join(struct.pack("<2Q", n, 0) for n in sizes)
    crc = struct.pack("<I", zlib.crc32(start + bytes(4) + table))
    with pytest.raises(codec.FrameError, match="part"):
        read(start + crc + table + b"".join(PARTS))


@pytest.mark.parametrize("dimensions", [65, 1 << 31, 1 << 63])
def test_shapes_that_do_not_fit_the_message_are_refused(dimensions):
    start = WHOLE[:20]
    table = struct.pack("<2Q", 10, dimensions)
    crc = struct.pack("<I", zlib.crc32(start + bytes(4) + table))
    with pytest.raises(codec.FrameError, match="ends before its first tensor"):
        read(start + crc + table + bytes(1000))


@pytest.mark.parametrize(
    ("kind", "place", "tensors"),
    [
        (MessageKind.ACTIVATIONS, PLACE, 3),
        (MessageKind.GRADIENTS, Place(2, PLACE.run), 3),
        (MessageKind.GRADIENTS, PLACE, 2),
    ],
)
def test_message_of_another_place_is_refused(kind, place, tensors):
    with pytest.raises(codec.StateError, match="run the same schedule"):
        unpack(WHOLE, kind, place, tensors)


def test_report_names_the_error_that_repeating_cannot_mend():
    notes = Notes()
    missing = codec.StateError("missing")
    missing.item = (4, 2)
    for error in (Aborted(), missing, codec.ArgumentError("NaN", codec.Status.NONFINITE), codec.FrameError("late")):
        notes.add(error, 5)
    notes.ids = {0: [9, 4], 1: [2]}
    found = report_of(notes.report(last=False, samples=True), 1)
    assert found == (True, False, "NaN", False, codec.Status.NONFINITE, {5: [4, 2]}, [2, 4, 9], None)
    assert report_of(Notes().report(last=True, samples=False), 0) == (False, True, "", True, None, {}, [], None)
    measured = {"microseconds": 7, "sent": [[0, 1, -1, 5, 6]]}
    assert report_of(Notes().report(last=True, samples=False, auto=measured), 0).auto == {
        "microseconds": 7,
        "sent": [(0, 1, -1, 5, 6)],
    }


VALID = json.loads(Notes().report(last=False, samples=False))


@pytest.mark.parametrize(
    "changed",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        *(json.dumps(VALID | wrong).encode() for wrong in ({"unknown": 3}, {"samples": [1 << 70]}, {"code": "x"})),
        *(json.dumps(VALID | {name: float("inf")}).encode() for name in ("unknown", "samples", "code")),
        json.dumps(VALID | {"unknown": [[float("inf"), [1]]]}).encode(),
        *(json.dumps({k: v for k, v in VALID.items() if k != name}).encode() for name in VALID),
    ],
)
def test_other_bytes_are_no_report(changed):
    with pytest.raises(codec.PeerError, match="is not valid"):
        report_of(changed, 1)


@pytest.mark.parametrize("code", [99, -1, 1 << 70, "99"])
def test_code_that_is_no_status_is_none(code):
    report = report_of(json.dumps(VALID | {"code": code}).encode(), 1)
    assert report.code is None
