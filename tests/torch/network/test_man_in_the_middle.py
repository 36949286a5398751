"""A man in the middle of two ranks changes, cuts, delays, repeats, relays or redirects the bytes of their connection.

MODES lists the ways to secure connections. In every mode, each rank raises CodecError within the timeout, or succeeds;
an error leaves its tensor unchanged. In modes that protect messages, a rank that succeeds has the right result.
"""

import os
import random
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from support import middle
from support.certificates import certificate
from support.middle import (
    PATIENT,
    SLACK,
    TIMEOUT,
    TO_CLIENT,
    TO_SERVER,
    Cut,
    Dribble,
    Middle,
    Replay,
    Stall,
    changed,
    dropped,
    exchanged,
    injected,
    repeated,
)
from support.ranks import RankPool
from support.tiers import NIGHTLY

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/network"))
import netns

HEADER = struct.Struct("<4sIQIIqQ")  # of messages (protocol.md, section 3)
# Offset and size of the fields of hellos, of headers of messages, and of records of TLS.
HELLO = {"magic": (0, 4), "token": (4, 16), "version": (20, 8), "rank": (28, 8), "tag": (36, 8), "flags": (44, 1)}
FIELDS = {"magic": (0, 4), "kind": (4, 4), "collective": (8, 8), "part": (16, 4), "index": (20, 4)}
FIELDS |= {"signature": (24, 8), "size": (32, 8)}
RECORD = {"type": (0, 1), "version": (1, 2), "size": (3, 2)}
HELLO_NBYTES, RECORD_NBYTES = 45, 5
SECRET = {"CODEC_SECRET": "0123456789abcdef-the-secret"}


class Mode(NamedTuple):
    """Way to secure connections."""

    name: str
    environment: dict[str, str]

    @property
    def protected(self):
        """True if messages cannot be changed unnoticed."""
        return self.name in ("psk", "certificates")


@pytest.fixture(scope="module", params=["plain", "secret", "psk", "certificates"])
def mode(request, tmp_path_factory):
    environment = {"plain": {}, "secret": SECRET, "psk": SECRET | {"CODEC_TLS": "psk"}}
    if request.param in environment:
        return Mode(request.param, environment[request.param])
    both, public = certificate(tmp_path_factory.mktemp("certificates"), "rank")
    files = {"CODEC_TLS_CERT": public, "CODEC_TLS_KEY": both.with_suffix(".key"), "CODEC_TLS_CA": public}
    return Mode("certificates", {name: str(path) for name, path in files.items()})


class Place(NamedTuple):
    """Field of the handshake, of a message or of a record of TLS in the bytes of a connection."""

    toward: int
    name: str
    at: int  # offset
    nbytes: int
    last: bool = False  # True: the message is the report, after which the other rank may succeed

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
                *_, nbytes = HEADER.unpack_from(stream, at)
                assert stream[at : at + 4] == b"CDCM"
            last = at + size + nbytes == len(stream)
            for field, (offset, width) in (fields | {"body": (size, nbytes)}).items():
                if width:
                    later.append(Place(toward, f"{name} {number}, {field}", at + offset, width, last))
            at, number = at + size + nbytes, number + 1
    return first, later


@pytest.fixture(scope="module")
def seed():
    value = int(os.environ.get("CODEC_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"CODEC_SEED={value}")
    return value


@pytest.fixture
def chance(seed, request):
    print(f"CODEC_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


def _network():
    """Return three network namespaces, or None if this user cannot make them."""
    if os.geteuid():
        return None
    try:
        return netns.Network(3).__enter__()
    except netns.NetworkError as e:
        if "not permitted" in str(e):  # root lacks the privilege, as in a container
            return None
        raise


class Scene:
    """Two ranks with a man in the middle: in three network namespaces if this user can make them, or on loopback."""

    def __init__(self):
        self.network = _network()
        names = [None] * 3 if self.network is None else self.network.names
        host = "127.0.0.1" if self.network is None else self.network.address(2)
        self.ranks = RankPool(2, namespaces=names[:2])
        self.middle = Middle(host, names[2])
        self.right = {}  # digest of the result, by algorithm

    def close(self):
        self.middle.__exit__()
        self.ranks.__exit__()
        if self.network is not None:
            self.network.close()

    def begin(self, mode, attack=None):
        """Make a new group of ranks, whose connections the attack disturbs."""
        self.ranks.run(middle.secured, mode.environment)
        self.ranks.new_group()
        self.middle.reset(*([] if attack is None else [attack]))
        self.middle.target = self.ranks.run(middle.lead_through, self.middle.host, self.middle.port)[0]

    def undisturbed(self, mode, algorithm="two_shot", attack=None):
        """Run a collective that must succeed; return the bytes of its connection."""
        self.begin(mode, attack)
        found = self.ranks.run(middle.reduced, algorithm, PATIENT)
        assert [error for error, *_ in found] == ["", ""], found
        assert found[0][3] == found[1][3] == self.right.setdefault(algorithm, found[0][3])
        return self.middle.seen()

    def disturbed(self, mode, attack, algorithm="two_shot"):
        """Run a collective with an attack; return the names of the ranks' errors, "" for success.

        Check that ranks end in time and, if messages are protected, that no result is wrong.
        """
        self.begin(mode, attack)
        found = self.ranks.run(middle.reduced, algorithm, TIMEOUT)
        errors = [error for error, *_ in found]
        assert attack.done, found
        for error, text, seconds, result in found:
            assert seconds < 2 * TIMEOUT + SLACK, (error, text, seconds)
            assert error or not mode.protected or result == self.right[algorithm], "a wrong result"
        if any(errors):  # the group is lost or, if it was never connected, connects anew
            later = self.ranks.run(middle.reduced, algorithm, TIMEOUT)
            for error, text, _, result in later:
                assert error == "PeerError" or (not error and result == self.right[algorithm]), (error, text)
            assert len({error for error, *_ in later}) == 1, later
        return errors


@pytest.fixture(scope="module")
def scene():
    made = Scene()
    yield made
    made.close()


def test_slow_and_fragmented_bytes_give_the_right_result(scene, mode, chance):
    for algorithm in ("two_shot", "raw"):
        scene.undisturbed(mode, algorithm)
        scene.undisturbed(mode, algorithm, Dribble(chance.random()))


def test_changed_byte_of_the_handshake_is_an_error_on_both_ranks(scene, mode, chance):
    places, _ = _places(mode, scene.undisturbed(mode))
    for place in places if NIGHTLY else chance.sample(places, 2):
        assert scene.disturbed(mode, place.changed(chance)) == ["PeerError"] * 2, place


def test_changed_message_is_an_error_unless_its_mode_protects_nothing(scene, mode, chance):
    """Without TLS, frames have a checksum, and headers are compared. Raw values have neither."""
    for algorithm in ("two_shot", "raw"):
        _, places = _places(mode, scene.undisturbed(mode, algorithm))
        for place in places if NIGHTLY else chance.sample(places, 2):
            errors = scene.disturbed(mode, place.changed(chance), algorithm)
            print(algorithm, place, errors)
            if mode.protected:
                assert errors == ["PeerError"] * 2 or (place.last and "PeerError" in errors), place


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
