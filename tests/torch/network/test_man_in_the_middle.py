"""A man in the middle of two ranks changes, cuts, delays, repeats or reorders the bytes of their connection.

In every mode, each rank raises CodecError within the timeout, or succeeds; an error leaves its tensor unchanged. A rank
that succeeds has the right result, unless a mode that does not protect messages meets bytes with right checksums.
"""

import struct
from typing import NamedTuple

import pytest

from support.middle import (
    TO_CLIENT,
    TO_SERVER,
    Cut,
    Dribble,
    Stall,
    changed,
    dropped,
    exchanged,
    injected,
    repeated,
)
from support.tiers import NIGHTLY

HEADER = struct.Struct("<4sIQIIqQII")  # of messages (protocol.md, section 3)
# Offset and size of the fields of hellos, of headers of messages, and of records of TLS.
HELLO = {"magic": (0, 4), "token": (4, 16), "version": (20, 8), "rank": (28, 8), "tag": (36, 8), "flags": (44, 1)}
FIELDS = {"magic": (0, 4), "kind": (4, 4), "collective": (8, 8), "part": (16, 4), "index": (20, 4)}
FIELDS |= {"signature": (24, 8), "size": (32, 8), "checksum": (40, 4), "CRC-32": (44, 4)}
RECORD = {"type": (0, 1), "version": (1, 2), "size": (3, 2)}
HELLO_NBYTES, RECORD_NBYTES = 45, 5


class Place(NamedTuple):
    """Field of the handshake, of a message or of a record of TLS in the bytes of a connection."""

    toward: int
    name: str
    at: int  # offset
    nbytes: int
    last: bool = False  # True: the message is the report, after which the other rank may succeed

    @property
    def ignored(self):
        """True if TLS ignores the field: the version in the header of a record in plain text (RFC 8446, 5.1)."""
        return self.name == "record 0, version"

    def changed(self, chance):
        """Return an attack that inverts one bit."""
        return changed(self.toward, self.at + chance.randrange(self.nbytes), 1 << chance.randrange(8))


def _places(mode, seen):
    """Return the places of the handshake, and of the messages, or of the records of TLS."""
    first = [Place(TO_SERVER, f"hello, {name}", *place) for name, place in HELLO.items()]
    later = []
    for toward, stream in enumerate(seen):
        at = HELLO_NBYTES if toward == TO_SERVER else 0
        if mode.name == "secret":
            first += [Place(toward, "nonce", at, 32), Place(toward, "proof", at + 32, 32)]
            at += 64
        number = 0
        while at < len(stream):
            if mode.protected:
                name, fields, size = "record", RECORD, RECORD_NBYTES
                nbytes = int.from_bytes(stream[at + 3 : at + 5], "big")
            else:
                name, fields, size = "message", FIELDS, HEADER.size
                *_, nbytes, _, _ = HEADER.unpack_from(stream, at)
                assert stream[at : at + 4] == b"CDCM"
            last = at + size + nbytes == len(stream)
            for field, (offset, width) in (fields | {"body": (size, nbytes)}).items():
                if width:
                    later.append(Place(toward, f"{name} {number}, {field}", at + offset, width, last))
            at, number = at + size + nbytes, number + 1
    return first, later


def test_slow_and_fragmented_bytes_give_the_right_result(scene, mode, chance):
    for algorithm in ("two_shot", "raw"):
        scene.undisturbed(mode, algorithm)
        scene.undisturbed(mode, algorithm, Dribble(chance.random()))


def test_changed_byte_of_the_handshake_is_an_error_on_both_ranks(scene, mode, chance):
    places, _ = _places(mode, scene.undisturbed(mode))
    for place in places if NIGHTLY else chance.sample(places, 1):
        assert scene.disturbed(mode, place.changed(chance)) == ["PeerError"] * 2, place


def test_changed_message_is_an_error(scene, mode, chance):
    """Without TLS, checksums detect the change of a single bit."""
    for algorithm in ("two_shot", "raw"):
        _, places = _places(mode, scene.undisturbed(mode, algorithm))
        for place in places if NIGHTLY else chance.sample(places, 1):
            errors = scene.disturbed(mode, place.changed(chance), algorithm)
            print(algorithm, place, errors)
            if mode.protected and not (place.ignored and errors == ["", ""]):
                assert errors == ["PeerError"] * 2 or (place.last and "PeerError" in errors), place
            if not mode.protected:
                assert "" not in errors or (place.last and errors != ["", ""]), place


EDITS = {
    "drops": lambda toward, at: dropped(toward, at, 16),
    "repeats": lambda toward, at: repeated(toward, at, 40),
    "injects": lambda toward, at: injected(toward, at, b"CDCM" + bytes(36)),
    "reorders": lambda toward, at: exchanged(toward, at, 20),
    "cuts": Cut,
    "resets": lambda toward, at: Cut(toward, at, reset=True),
    "stalls": Stall,
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_stream_is_an_error_on_both_ranks(scene, mode, name, chance):
    seen = scene.undisturbed(mode)
    for _ in range(20 if NIGHTLY else 1):
        toward = chance.choice((TO_SERVER, TO_CLIENT))
        # Bytes before the reports, which are the last messages: after a report, the other rank may have succeeded.
        at = chance.randrange(len(seen[toward]) - 200)
        print(toward, at)
        errors = scene.disturbed(mode, EDITS[name](toward, at))
        assert "" not in errors
        assert "PeerError" in errors  # the other one may be a FrameError
        assert not mode.protected or set(errors) == {"PeerError"}
