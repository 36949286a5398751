"""Congestion control of connections between ranks."""

import socket

import pytest

from codec.torch.network import sockets
from support.meshes import tcp_pair


@pytest.fixture
def of_new_connection():
    """Return a function that prepares a new connection, and returns its congestion control before and after."""

    def run():
        a, b = tcp_pair()
        with a, b:
            before = _name(a)
            sockets.prepare(a)
            assert a.gettimeout() == 0
            assert a.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            return before, _name(a)

    return run


def _name(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def test_variable_chooses_the_congestion_control(of_new_connection, monkeypatch):
    monkeypatch.setenv("CODEC_TCP_CONGESTION", "reno")  # part of every kernel
    assert of_new_connection()[1] == "reno"


@pytest.mark.parametrize("name", ["", "none such", "b\u00e9r"])
def test_unknown_congestion_control_leaves_the_default_of_the_kernel(of_new_connection, monkeypatch, name):
    monkeypatch.setenv("CODEC_TCP_CONGESTION", name)
    before, after = of_new_connection()
    assert after == before


@pytest.mark.parametrize("far", [True, False])
def test_connections_with_long_round_trips_alone_use_bbr_where_the_kernel_has_it(of_new_connection, monkeypatch, far):
    monkeypatch.delenv("CODEC_TCP_CONGESTION", raising=False)
    monkeypatch.setattr(sockets, "_FAR", 0.0 if far else 60.0)
    before, after = of_new_connection()
    assert after == ("bbr" if far and "bbr" in sockets._congestion_controls() else before)


def test_congestion_control_that_the_kernel_refuses_is_no_error(of_new_connection, monkeypatch):
    monkeypatch.setenv("CODEC_TCP_CONGESTION", "none such")
    monkeypatch.setattr(sockets, "_congestion_controls", lambda: ["none such"])
    before, after = of_new_connection()
    assert after == before
