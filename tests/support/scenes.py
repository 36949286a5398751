"""Two ranks with a man in the middle, and the ways to secure their connection."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

from support import middle
from support.middle import PATIENT, SLACK, TIMEOUT, Middle
from support.ranks import RankPool
from support.tls import Authority

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/network"))
import netns

MODES = "plain", "secret", "psk", "certificates"
SECRET = {"CODEC_SECRET": "0123456789abcdef-the-secret"}


class Mode(NamedTuple):
    """Way to secure connections."""

    name: str
    environment: dict[str, str]

    @property
    def protected(self):
        """True if messages cannot be changed unnoticed."""
        return self.name in ("psk", "certificates")


def mode_of(name, folder):
    """Return the mode of a name; certificates are made in a folder."""
    if name != "certificates":
        return Mode(name, {"plain": {}, "secret": SECRET, "psk": SECRET | {"CODEC_TLS": "psk"}}[name])
    return Mode(name, Authority(folder).variables())


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
        self._place = ("127.0.0.1" if self.network is None else self.network.address(2)), names[2]
        self.ranks = RankPool(2, namespaces=names[:2])
        self.middle = Middle(*self._place)
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
        self.middle.__exit__()
        self.middle = Middle(*self._place)  # a new port: a late connection of an old group may come to the old one
        self.middle.attack = attack or self.middle.attack
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
        seconds = TIMEOUT
        while True:
            self.begin(mode, attack)
            found = self.ranks.run(middle.reduced, algorithm, seconds)
            if attack.done:
                break
            seconds *= 2  # on a busy machine, the ranks may give up before the attack has begun
            assert seconds < PATIENT, found
        errors = [error for error, *_ in found]
        for error, text, took, result in found:
            assert took < 2 * seconds + SLACK, (error, text, took)
            assert error or not mode.protected or result == self.right[algorithm], "a wrong result"
        if any(errors):  # the group is lost or, if it was never connected, connects anew
            for error, text, _, result in self.ranks.run(middle.reduced, algorithm, TIMEOUT):
                assert error == "PeerError" or (not error and result == self.right[algorithm]), (error, text)
        return errors
