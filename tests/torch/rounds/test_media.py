"""Contract of the stores in which codec.torch.Rounds writes objects."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.rounds.media import medium_of
from support.local_training import Linear
from support.rounds import MemoryStore, together


@pytest.fixture(params=["folder", "file URL", "memory URL", "TCPStore"])
def site_store(request, tmp_path):
    """Return a function that returns the store as seen by a site."""
    if request.param == "TCPStore":
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

        def connect(site):
            own = dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=20))
            return medium_of(own, site)

        yield connect
        return
    name = f"{os.getpid()}-{request.node.name}"
    url = {"folder": tmp_path / "run", "file URL": f"file://{tmp_path}/run", "memory URL": f"memory://{name}"}
    yield lambda site: medium_of(url[request.param], site)


def test_objects_are_written_listed_read_and_deleted(site_store):
    a, b = site_store("a"), site_store("b")
    assert a.names() == []
    assert a.get("x", 10) is None
    a.put("x", b"one")
    a.put("x", b"two")
    b.put("y", b"\x00" * 9)
    assert sorted(b.names()) == sorted(a.names()) == ["x", "y"]
    assert b.get("x", 3) == b"two"
    assert a.get("y", 9) == bytes(9)
    a.delete(["x", "missing"])
    assert b.names() == ["y"]
    assert b.get("x", 3) is None


def test_one_of_several_sites_creates_an_object(site_store):
    stores = [site_store(f"site{i}") for i in range(6)]
    barrier = threading.Barrier(len(stores))

    def create(i):
        barrier.wait()
        return stores[i].create("m", b"%d" % i)

    for _ in range(3):
        created = together(*(lambda i=i: create(i) for i in range(len(stores))))
        assert created.count(True) == 1
        assert stores[0].get("m", 1) == b"%d" % created.index(True)
        assert not stores[0].create("m", b"other")
        stores[0].delete(["m"])


def test_objects_that_are_too_large_are_not_read(site_store):
    store = site_store("a")
    store.put("x", bytes(1000))
    with pytest.raises(codec.LimitError, match="'x'"):
        store.get("x", 999)


def test_large_objects_arrive_unchanged(site_store):
    data = os.urandom((9 << 20) + 5)  # more than a TCPStore accepts as one value
    store = site_store("a")
    assert store.create("x", data)
    assert site_store("b").get("x", len(data)) == data


def test_folder_keeps_one_file_of_killed_processes(tmp_path):
    """The next process of a site overwrites the temporary file of a killed one, and objects do not change."""
    store = medium_of(tmp_path, "a")
    assert store.create("m", b"old")
    os.link(tmp_path / "m", tmp_path / ".a.0.part")  # as if killed between the link and the removal
    assert medium_of(tmp_path, "a").create("n", b"new")
    assert store.get("m", 3) == b"old"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("hf://buckets/me/run", "'hf' is not known"),
        ("https://host/run", "'https' is not known"),
        (3, "store must be a path"),
        (None, "store must be a path"),
    ],
)
def test_other_stores_are_refused(store, message):
    model = Linear()
    with pytest.raises(codec.ArgumentError, match=message):
        codec.torch.Rounds(model, torch.optim.SGD(model.parameters()), store, "a")


def test_store_that_ignores_conditions_is_refused():
    class Careless(MemoryStore):
        def create(self, name, data):
            self.objects[name] = data
            return True

    model = Linear()
    with pytest.raises(codec.ArgumentError, match="ignores the condition"):
        codec.torch.Rounds(model, torch.optim.SGD(model.parameters()), Careless(), "a")
