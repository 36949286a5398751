"""Rounds of sites through S3: moto's server, as S3, refuses to create an object twice."""

import os
import threading

import pytest

import codec
from codec.torch.rounds.media import medium_of
from support.local_training import ROUNDED, nesterov
from support.rounds import Pushing, together
from support.s3_server import s3_server


@pytest.fixture(scope="module")
def bucket():
    """Return the URL of an empty bucket."""
    with s3_server():
        yield "s3://bucket"


def test_objects_are_created_once_and_bounded(bucket):
    stores = [medium_of(f"{bucket}/objects", f"site{i}") for i in range(6)]
    assert stores[0].names() == []
    assert stores[0].get("m", 9) is None
    barrier = threading.Barrier(len(stores))

    def create(i):
        barrier.wait()
        return stores[i].create("m", b"%d" % i)

    created = together(*(lambda i=i: create(i) for i in range(len(stores))))
    assert created.count(True) == 1
    assert stores[0].get("m", 1) == b"%d" % created.index(True)
    stores[0].put("m", b"longer")
    with pytest.raises(codec.LimitError, match="'m'"):
        stores[1].get("m", 5)
    assert stores[1].names() == ["m"]
    stores[0].delete(["m", "missing"])
    assert stores[1].names() == []


def test_objects_in_several_parts_are_created_once(bucket):
    store, data = medium_of(f"{bucket}/large", "a"), os.urandom(1 << 20) * 110
    assert store.create("m", data)
    assert not store.create("m", data[::-1])
    assert store.get("m", len(data)) == data


def test_sites_train_through_s3(bucket):
    sites = [Pushing(f"{bucket}/run", i, spec=ROUNDED, outer=nesterov, quorum=2, grace=None) for i in range(3)]

    def run(site):
        while site.rounds.merged < 6:
            site.steps(1)

    together(*(lambda site=site: run(site) for site in sites))
    joined = Pushing(f"{bucket}/run", 3, spec=ROUNDED, outer=nesterov)
    assert {site.member.site.anchors_digest() for site in (*sites, joined)} == {joined.member.site.anchors_digest()}
