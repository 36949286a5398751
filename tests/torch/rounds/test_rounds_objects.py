"""Objects of codec.torch.Rounds in a store: signatures, and bytes that are damaged or hostile."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
import codec.torch
from codec._secret import Secret
from codec.torch.rounds.names import manifest_name, snapshot_name
from codec.torch.rounds.objects import ChangeHead, ManifestHead, SnapshotHead, sealed, unsealed
from support.local_training import ROUNDED, Linear, nesterov, raised
from support.rounds import MemoryStore, Pushing

SECRET = b"k" * 32


def test_objects_are_signed_by_the_secret_of_the_sites():
    store = MemoryStore()
    with codec.options(secret=SECRET):
        a = Pushing(store, 0)
        a.steps(2)
        b = Pushing(store, 1)
    assert b.rounds.merged == 1
    with pytest.raises(codec.FrameError, match="is signed: set CODEC_SECRET_FILE"):
        Pushing(store, 2)
    with codec.options(secret=b"other" * 8), pytest.raises(codec.FrameError, match="another secret"):
        Pushing(store, 2)
    plain = MemoryStore()
    Pushing(plain, 0).steps(2)
    with codec.options(secret=SECRET), pytest.raises(codec.FrameError, match="is not signed"):
        Pushing(plain, 1)


def test_signed_objects_are_bound_to_their_names_and_runs():
    """An object that was copied to another name, or from another run, is refused."""
    store, other = MemoryStore(), MemoryStore()
    with codec.options(secret=SECRET):
        for each in (store, other):
            Pushing(each, 0).steps(4)
        store.objects[manifest_name(1)] = store.objects[manifest_name(0)]
        with pytest.raises(codec.FrameError, match="was changed"):
            Pushing(store, 1)
        store.objects[manifest_name(1)] = other.objects[manifest_name(1)]
        with pytest.raises(codec.StateError, match="is of another run"):
            Pushing(store, 1)


def objects():
    """Return a store after three rounds, the second of which has a snapshot, and the names of its objects by kind."""
    store = MemoryStore()
    site = Pushing(store, 0, spec=ROUNDED, outer=nesterov)
    site.steps(2)
    site.member._write_snapshot()
    site.steps(2)
    del store.objects[snapshot_name(0)]
    return store


_STORE = objects()
_NAMES = sorted(_STORE.objects)


@settings(deadline=None)
@given(st.data())
def test_damaged_objects_are_errors_that_change_nothing(data):
    """A site that joins either adopts the run's state, or raises an error, for each damaged object."""
    store = MemoryStore()
    store.objects.update(_STORE.objects)
    name = data.draw(st.sampled_from(_NAMES))
    raw = bytearray(store.objects[name])
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "swap"]))
    if kind == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    elif kind == "grow":
        raw += data.draw(st.binary(min_size=1, max_size=64))
    else:
        raw = bytearray(store.objects[data.draw(st.sampled_from(_NAMES))])
    changed = bytes(raw) != store.objects[name]
    store.objects[name] = bytes(raw)
    model = Linear()
    error = raised(lambda: Pushing(store, 1, spec=ROUNDED, outer=nesterov, model=model, timeout=5))
    if changed and "snapshot-0000000000" not in name and error is None:
        joined = Pushing(store, 2, spec=ROUNDED, outer=nesterov)
        assert joined.rounds.merged <= 2
    assert error is None or error[0] in ("FrameError", "ChecksumError", "StateError", "ArgumentError", "PeerError")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=4), x, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.sampled_from([ChangeHead, ManifestHead, SnapshotHead]), st.data())
def test_heads_with_wrong_fields_are_errors(cls, data):
    name = next(n for n in _NAMES if n.startswith(cls.__name__.removesuffix("Head").lower()))
    head, _ = unsealed(name, _STORE.objects[name], None)
    assert cls.read(name, head).entries().keys() == head.keys()
    key = data.draw(st.sampled_from(sorted(head)))
    value = data.draw(_JSON)
    try:
        found = cls.read(name, head | {key: value})
    except codec.FrameError:
        return
    assert json.loads(json.dumps(found.entries()))[key] == json.loads(json.dumps(value))


@settings(deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_are_no_objects(data, framed):
    raw = sealed("x", {}, [data], None)[:44] + data if framed else data
    try:
        unsealed("x", raw, None)
    except codec.FrameError:
        return
    assert raw.startswith(b"\x89CRND1")


def test_huge_head_is_refused_before_it_is_parsed():
    raw = bytearray(sealed("x", {}, [bytes(100)], None))
    raw[40:44] = (1 << 31).to_bytes(4, "little")
    with pytest.raises(codec.FrameError, match="head"):
        unsealed("x", bytes(raw), None)


def test_object_is_signed_with_its_name():
    key = Secret(SECRET)
    data = sealed("a", {"x": 1}, [b"payload"], key)
    assert bytes(unsealed("a", data, key)[1]) == b"payload"
    with pytest.raises(codec.FrameError):
        unsealed("b", data, key)
