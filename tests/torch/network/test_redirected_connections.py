"""A man in the middle replays, downgrades, exchanges or redirects whole connections of ranks.

Without a secret or TLS these attacks succeed, which the tests check, too: docs/internals/threat-model.md says so.
"""

import os

import pytest
import torch.distributed as dist

import codec
from codec._security import security_of_environment
from codec.torch.network.endpoint import Endpoint
from support import middle
from support.handshakes import address_of, publish, waiting
from support.meshes import SECONDS, Group, until
from support.middle import PATIENT, TIMEOUT, TO_SERVER, Crossed, Edit, Middle, Replay, exchanged_tags

ANOTHER_FLAG = {"plain": (1, 2, 3), "secret": (0, 2, 3), "psk": (0, 1, 2), "certificates": (0, 1, 3)}


def test_recorded_bytes_of_another_group_are_refused(scene, mode):
    seen = scene.undisturbed(mode)
    assert scene.disturbed(mode, Replay(seen[TO_SERVER])) == ["PeerError"] * 2


def test_recorded_bytes_for_the_same_port_are_refused_if_there_is_a_proof(scene, mode):
    seen = scene.undisturbed(mode)
    scene.ranks.run(middle.replayed, scene.middle.target, seen[TO_SERVER], mode.name != "plain")
    if mode.name == "plain":
        until(lambda: scene.ranks.run(middle.waiting)[0] == [(1, -2)])  # an unused connection, which does no harm
    else:
        assert scene.ranks.run(middle.waiting)[0] == []
    found = scene.ranks.run(middle.reduced, "two_shot", PATIENT)
    assert [(error, result) for error, _, _, result in found] == [("", scene.right["two_shot"])] * 2


@pytest.mark.parametrize("where", ["hello", "store", "both"])
def test_other_flags_are_an_error_and_no_message_is_sent(scene, mode, where, chance):
    flags = chance.choice(ANOTHER_FLAG[mode.name])
    scene.begin(mode, None if where == "store" else Edit(TO_SERVER, 44, 1, lambda old: bytes([flags])))
    if where != "hello":
        scene.ranks.run(middle.lead_through, scene.middle.host, scene.middle.port, flags)
    found = scene.ranks.run(middle.reduced, "two_shot", TIMEOUT)
    assert [error for error, *_ in found] == ["PeerError"] * 2, found
    assert b"CDCM" not in b"".join(scene.middle.seen()) or mode.name == "plain"


def test_exchanged_tags_of_two_hellos_are_an_error_if_there_is_a_proof(scene, mode):
    scene.begin(mode, exchanged_tags({1: 2, 2: 1}))
    received, sent = scene.ranks.run(middle.exchanged_messages, b"x", PATIENT if mode.name == "plain" else TIMEOUT)
    if mode.name == "plain":
        assert (received, sent) == ([b"x, tag 2", b"x, tag 1"], ["sent"] * 2)
    else:
        assert received == sent == ["PeerError"] * 2


def test_exchanged_connections_are_an_error_with_tls(scene, mode):
    attack = Crossed()
    scene.begin(mode, attack)
    received, _ = scene.ranks.run(middle.exchanged_messages, b"first", PATIENT)
    assert received == [b"first, tag 1", b"first, tag 2"]
    attack.active = True
    received, _ = scene.ranks.run(middle.exchanged_messages, b"second", TIMEOUT if mode.protected else PATIENT)
    assert received == (["PeerError"] * 2 if mode.protected else [b"second, tag 2", b"second, tag 1"])


# A rank that is led to another port


@pytest.fixture
def secured(mode, monkeypatch):
    """Set the environment of each mode."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in [name for name in os.environ if name.startswith(("CODEC_SECRET", "CODEC_TLS"))]:
        monkeypatch.delenv(name)
    for name, value in mode.environment.items():
        monkeypatch.setenv(name, value)
    return mode


def test_jobs_need_secrets_of_their_own(secured):
    """A writer of the store of a job can connect its ranks to those of another job with the same secret or issuer."""
    here, there = dist.HashStore(), dist.HashStore()
    (_, client), (server, _) = _ranks(2, here), _ranks(2, there)
    here.set("codec/point-to-point/0", there.get("codec/point-to-point/0"))
    client.connect([0], 7, SECONDS)
    assert server.accept(1, 7, SECONDS) is not None


def _ranks(size, store):
    return [Endpoint(Group(rank, size, store), SECONDS, security_of_environment()) for rank in range(size)]


@pytest.mark.parametrize("elsewhere", ["rank", "group"])
def test_connection_led_to_another_rank_or_group_is_refused_if_there_is_a_proof(secured, elsewhere):
    """The highest rank of three connects to rank 0, but arrives at rank 1, or at rank 0 of another group."""
    here, there = dist.HashStore(), dist.HashStore()
    *_, client = ranks = _ranks(3, here)
    server, store, number = (ranks[1], here, "1") if elsewhere == "rank" else (_ranks(4, there)[0], there, "0")
    token, flags, address = address_of(store, number)
    with Middle() as proxy:
        proxy.target = address
        proxy.attack = Edit(TO_SERVER, 4, 16, lambda old: token)  # of the port that the attacker prefers
        publish(here, 0, proxy.port, token=address_of(here, 0)[0], flags=flags)
        if secured.name == "plain":
            client.connect([0], 7, SECONDS)
            assert server.accept(2, 7, SECONDS) is not None
            return
        with pytest.raises(codec.PeerError, match="another rank" if secured.name == "certificates" else "secret"):
            client.connect([0], 7, SECONDS)
        until(lambda: server._listener._strangers == {})
        assert waiting(server) == {}
