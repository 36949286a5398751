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
FIELDS = {"magic": 0, "kind": 4, "collective": 8, "part": 16, "index": 20, "signature": 24, "size": 32}
HELLO_FIELDS = {"magic": 0, "token": 4, "version": 20, "rank": 28, "tag": 36}


class Mode(NamedTuple):
    """Way to secure connections."""

    environment: dict[str, str]
    handshake: tuple[int, int]  # bytes of the handshake toward rank 0 and toward rank 1
    protected: bool  # True: messages cannot be changed


MODES = {
    "plain": Mode({}, (44, 0), False),
    "secret": Mode({"CODEC_SECRET": "0123456789abcdef-the-secret"}, (108, 64), False),
}


def _places(mode, seen):
    """Return the offset of a random byte in each field of the handshake and of each message, by direction and name."""
    places = {}
    for toward, stream in enumerate(seen):
        end = mode.handshake[toward]
        if toward == TO_SERVER:
            places |= {(toward, f"hello, {name}"): at for name, at in HELLO_FIELDS.items()}
        places |= {(toward, f"handshake from byte {at}"): at for at in range(44 if toward == TO_SERVER else 0, end, 32)}
        number = 0
        while end < len(stream):
            *_, nbytes = HEADER.unpack_from(stream, end)
            assert stream[end : end + 4] == b"CDCM"
            places |= {(toward, f"message {number}, {name}"): end + at for name, at in FIELDS.items()}
            if nbytes:
                places[toward, f"message {number}, body"] = end + HEADER.size + nbytes // 2
            end, number = end + HEADER.size + nbytes, number + 1
    return places


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


each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@each_mode
def test_slow_and_fragmented_bytes_give_the_right_result(scene, mode, chance):
    for algorithm in ("two_shot", "raw"):
        scene.undisturbed(mode, algorithm)
        scene.undisturbed(mode, algorithm, Dribble(chance.random()))


@each_mode
def test_changed_byte_of_the_handshake_is_an_error(scene, mode, chance):
    places = _places(mode, scene.undisturbed(mode))
    chosen = [(where, at) for where, at in places.items() if "message" not in where[1]]
    for (toward, name), at in chosen if NIGHTLY else chance.sample(chosen, 2):
        attack = changed(toward, at + chance.randrange(4), 1 << chance.randrange(8))
        assert scene.disturbed(mode, attack) == ["PeerError"] * 2, name


@each_mode
def test_changed_message_is_an_error_or_harmless(scene, mode, chance):
    """Without protection, a frame has a checksum, and headers are compared. Raw values have neither."""
    for algorithm in ("two_shot", "raw"):
        places = _places(mode, scene.undisturbed(mode, algorithm))
        chosen = [(where, at) for where, at in places.items() if "message" in where[1]]
        for (toward, name), at in chosen if NIGHTLY else chance.sample(chosen, 2):
            within = 1 if "body" in name else 4
            attack = changed(toward, at + chance.randrange(within), 1 << chance.randrange(8))
            errors = scene.disturbed(mode, attack, algorithm)
            print(algorithm, toward, name, errors)
            if mode.protected:
                assert "PeerError" in errors
                assert set(errors) <= {"PeerError", ""}


EDITS = {
    "drops": lambda toward, at: dropped(toward, at, 16),
    "repeats": lambda toward, at: repeated(toward, at, 40),
    "injects": lambda toward, at: injected(toward, at, b"CDCM" + bytes(36)),
    "reorders": lambda toward, at: exchanged(toward, at, 20),
    "cuts": Cut,
    "resets": lambda toward, at: Cut(toward, at, reset=True),
    "stalls": Stall,
}


@each_mode
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
