"""Random faults in lists, buckets and replies: receivers raise an error of codec, or get the right weights."""

import json
import os
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec.files.signing import SigningKey
from codec.stores import calls
from codec.stores.bucket import ObjectStore
from codec.weight_sync import Publisher, pull
from codec.weight_sync.http import fan_out, handler
from codec.weight_sync.http.arriving import Arriving
from codec.weight_sync.store.source import StoreReader, listing_of
from codec.weight_sync.updates.identity import NO_DIGEST, UpdateHead
from codec.weight_sync.updates.kinds import WeightsSize
from codec.weight_sync.updates.listing import Listed, Listing
from codec.weight_sync.updates.parts import Part, Parts
from support.hostile_servers import hostile

RUN, DIGEST, KEY = b"a run of 16 byte", b"d" * 16, SigningKey.to_sign(b"k" * 16)
PARTS = Parts.of(
    RUN, 2, 1, [Part(DIGEST, DIGEST, 900, WeightsSize(3, 68), b"s" * 32, url) for url in (None, "http://10.0.0.1:80")]
)
LISTS = Listing(
    RUN, (Listed(UpdateHead(RUN, 1, None, NO_DIGEST, DIGEST), 9), Listed(PARTS.head, 500, b"s" * 32, nparts=2))
)
VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 2, 1 << 16, (1 << 16) + 1, (1 << 64) - 1, 10**400, 1e999, "", "../head", "11" * 16, "é" * 32]
) | st.sampled_from([[], {}, [[]], [1, 2, 3], ["11" * 16], {"version": 1}])


def changed(data, value):
    """Return a JSON value in which one value, at any depth, was replaced, removed or repeated."""
    if not isinstance(value, list | dict) or not value or not data.draw(st.integers(0, 5)):
        return data.draw(VALUES)
    key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    copy = value.copy()
    what = data.draw(st.integers(0, 6))
    if what == 0:
        del copy[key]
    elif what == 1 and isinstance(copy, list):
        copy.append(copy[key])
    else:
        copy[key] = changed(data, copy[key])
    return copy


BOTH = pytest.mark.parametrize(
    ("right", "read"),
    [(LISTS, lambda body, key=None: listing_of("store", body, key)), (PARTS, Parts.parse)],
    ids=["updates", "parts"],
)


@BOTH
@given(data=st.data())
def test_lists_with_any_values(right, read, data):
    """A list that is accepted has the types of its fields, so that its bytes are accepted again."""
    assert read(right.to_bytes(KEY), KEY) == read(right.to_bytes()) == right
    body = json.dumps(changed(data, json.loads(right.to_bytes()))).encode()
    try:
        found = read(body)
    except codec.FrameError:
        pass
    else:
        assert read(found.to_bytes()) == found
    with pytest.raises(codec.FrameError, match="sign"):
        read(body, KEY)


@BOTH
@given(data=st.data())
def test_lists_with_any_bytes(right, read, data):
    body = bytearray(right.to_bytes(KEY))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=3) | st.just(b"[" * 99_999))
    with suppress(codec.FrameError):
        read(bytes(body))
    if bytes(body) != right.to_bytes(KEY):
        with pytest.raises(codec.FrameError):
            read(bytes(body), KEY)


WEIGHTS = [{"w": np.full(3000, k, np.float32)} for k in range(3)]


def has(receiver, version):
    """Return True if a receiver has exactly the weights of a version; None: it has none."""
    tensors = dict(receiver.tensors())
    return receiver.version == version and (not tensors if version is None else (tensors["w"] == version).all())


def pulled(receiver, source, versions):
    """Pull, and check that the receiver has one of `versions` afterwards, also after an error."""
    with suppress(codec.CodecError):
        pull(receiver, source, timeout=5)
    assert receiver.version in versions
    assert has(receiver, receiver.version)


@pytest.fixture(scope="module")
def objects():
    """Return the objects of a bucket to which version 2 was published after version 1, by name."""
    url = f"memory://{os.getpid()}/fuzzed"
    with Publisher(url) as publisher:
        for weights in WEIGHTS:
            publisher.publish(weights)
    store = ObjectStore(url)
    found = {name: store.get(name, 1 << 20) for name in store.names()}
    store.delete(found)
    return found


NUMBERS = st.sampled_from(["0" * 20, f"{1:020d}", f"{9:020d}", "9" * 20, "9" * 19, "\u0663" * 20, "../" + "9" * 17])


@given(data=st.data())
def test_buckets_with_any_objects(objects, data):
    """Objects are missing, replaced by others, and added; lists jump to any number."""
    url = f"memory://{os.getpid()}/{os.urandom(8).hex()}"
    store, receiver = ObjectStore(url), codec.WeightReceiver()
    bodies = st.sampled_from([*objects.values(), b"", LISTS.to_bytes()])
    for name, body in objects.items():
        store.put(name, body)
    assert pull(receiver, url) == 2
    receiver = codec.WeightReceiver(WEIGHTS[0] if data.draw(st.booleans()) else None)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(objects)) | NUMBERS.map("head-{}".format))
        body = data.draw(bodies)
        cut = data.draw(st.sampled_from([None, None, 1, -1, 200]))
        if data.draw(st.integers(0, 5)):
            store.put(name, body[:cut])
        else:
            store.delete([name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_PAUSE", 0.0)
        pulled(receiver, url, (None, 0, 1, 2))


def replies(body, name):
    """Return a strategy for the bytes with which a server may answer a request of a file."""
    n, s = len(body), st.sampled_from
    numbers = s([n, n, n - 1, n + 1, 0, -1, 5, 1 << 40, 10**30, "x"])
    bodies = s([body, body, body[:-1], body + b"x", body[5:], bytes(n), b"", body[::-1], body * 2])
    chunks = bodies.map(lambda x: b"%x\r\n%s\r\n0\r\n\r\n" % (len(x), x))
    headers = st.lists(
        numbers.map("Content-Length: {}".format)
        | st.tuples(numbers, numbers, numbers).map(lambda x: "Content-Range: bytes {}-{}/{}".format(*x))
        | s(
            [
                "Transfer-Encoding: chunked",
                "Content-Encoding: gzip",
                "Connection: close",
                "Codec-Depth: 1",
                "Codec-Depth: x",
            ]
        )
        | s(["127.0.0.1:1", "h", "127.0.0.1:1/.."]).map(lambda at: f"Location: http://{at}/{name}"),
        max_size=4,
    )
    status = s(["HTTP/1.1 200 OK", "HTTP/1.1 200 OK", "HTTP/1.1 206 Part", "HTTP/1.0 200 OK", "HTTP/1.1 307 There"])
    status |= s(["HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 200 OK", "HTTP/1.1 404 None", "HTTP/1.1 99999 x", "\0", ""])
    head = st.tuples(status, headers).map(lambda x: "\r\n".join([x[0], *x[1], "", ""]).encode())
    return st.tuples(head, bodies | chunks).map(b"".join)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return a server that sends receivers to a mirror, and a list with the reply of this mirror."""
    answer = []

    def reply(connection):
        connection.recv(4096)
        connection.sendall(answer[0])

    with pytest.MonkeyPatch.context() as patch, hostile(reply) as url:
        patch.setattr(handler, "MIN_NBYTES", 0)
        patch.setattr(fan_out, "READERS", 0)
        with Publisher(tmp_path_factory.mktemp("store"), host="127.0.0.1") as publisher:
            publisher.publish(WEIGHTS[0])
            with StoreReader(publisher.source) as reader:
                [one] = reader.listing().updates
                with Arriving(one.file, one.nbytes) as file:
                    reader._connection.copy(one.file, file, url.removeprefix("http://"))
                    yield publisher.source, one.file, bytes(file.mapped()), answer


@given(data=st.data())
def test_mirrors_with_any_reply(served, data):
    source, name, body, answer = served
    answer[:] = [data.draw(replies(body, name))]
    receiver = codec.WeightReceiver()
    assert pull(receiver, source) == 0
    assert has(receiver, 0)


@given(data=st.data())
def test_servers_with_any_reply(served, data):
    source, name, body, _ = served
    with StoreReader(source) as reader:
        head = reader._head()
    fuzzed, update = data.draw(st.booleans()), b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    right = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(head) + head
    reply = data.draw(replies(*((head, "head") if fuzzed else (body, name))))

    def answer(connection):
        while request := connection.recv(4096):
            is_head = b" /head " in request
            connection.sendall(reply if is_head == fuzzed else right if is_head else update)
            if is_head == fuzzed:
                return

    with hostile(answer) as url:
        pulled(codec.WeightReceiver(), url, (None, 0))
