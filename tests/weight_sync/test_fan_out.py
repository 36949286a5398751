"""Tree of mirrors in the server of a store: which receiver is sent to which mirror."""

import pytest

from codec.weight_sync.http import fan_out
from codec.weight_sync.http.fan_out import FanOut


@pytest.fixture(autouse=True)
def busy(monkeypatch):
    """Let servers be busy without receivers."""
    monkeypatch.setattr(fan_out, "READERS", 0)


def place(tree, peer, mirror, file=0):
    with tree.sending(file, peer, mirror) as node:
        return None if node is None else (str(node.address), node.depth)


def test_hints_form_a_tree_of_two_readers_each(monkeypatch):
    monkeypatch.setattr(fan_out, "READERS", 2)
    tree = FanOut()
    sends = [tree.sending(0, f"10.0.0.{k}", f"10.0.0.{k}:7") for k in (1, 2)]
    assert [one.__enter__() for one in sends] == [None, None]
    found = [place(tree, f"10.0.0.{k}", f"10.0.0.{k}:7") for k in range(3, 15)]
    parents = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert found == [(f"10.0.0.{p}:7", 1 if p < 3 else 2) for p in parents]
    assert place(tree, "10.0.0.9", "10.0.0.9:7") is None  # asks again: it must not wait for itself
    assert place(tree, "10.0.0.8", None) is None
    assert place(tree, "10.0.0.14", "-") == ("10.0.0.14:7", 3)  # the same machine, which has room
    for one in sends:
        one.__exit__(None, None, None)
    assert place(tree, "10.0.0.99", "-") is None  # no longer busy


@pytest.mark.parametrize(
    "mirror", ["10.0.0.2:7", "10.0.0.1:0", "10.0.0.1:99999", "10.0.0.1", "[::1]:7", "localhost:7", "", "-", "x" * 9999,
               "10.0.0.1:7 ", "10.0.0.1:٣", "[10.0.0.1]:7x"]
)  # fmt: skip
def test_mirrors_at_other_addresses_than_they_connect_from_are_ignored(mirror):
    tree = FanOut()
    assert place(tree, "10.0.0.1", mirror) is None
    assert place(tree, "10.0.0.3", "-") is None
    assert place(tree, "::ffff:10.0.0.1", "10.0.0.1:7") is None
    assert place(tree, "10.0.0.3", "-") == ("10.0.0.1:7", 1)


def test_table_of_mirrors_is_bounded_and_forgets(monkeypatch):
    monkeypatch.setattr(fan_out, "_MIRRORS", 100)
    tree = FanOut()
    for port in range(1, 40):
        place(tree, "10.0.0.1", f"10.0.0.1:{port}")
    nodes = tree._trees[0].nodes
    assert len(nodes) == 16
    for k in range(200):
        place(tree, f"10.1.0.{k}", f"10.1.0.{k}:7")
    assert len(nodes) == 100
    for k in range(1, 100):
        place(tree, "10.0.0.1", "10.0.0.1:7", k)
    assert len(tree._trees) == 8
    assert place(tree, "10.0.0.2", "-", 99) == ("10.0.0.1:7", 1)
    monkeypatch.setattr(fan_out, "SECONDS", -1.0)
    assert place(tree, "10.0.0.2", "-", 99) is None
