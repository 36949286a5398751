"""Packed model files restore every byte, packing is deterministic, and damaged or forged containers are errors."""

import copy
import dataclasses
import json
import zlib
from io import BytesIO

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

import codec
from codec.files import packing, parts
from codec.files.header import MAX_JSON, parse
from codec.files.index import GROUPS, INDEX, Index
from codec.files.opening import MemoryBytes
from codec.files.packing import pack
from codec.files.reading import open_bytes, read_header
from codec.files.sources import MemorySource
from support.model_files import contents, forged, safetensors, taken_apart, tensors
from support.tiers import N_DAMAGED, N_EXAMPLES


class BytesSource:
    """A .safetensors file in memory, as input of packing."""

    def __init__(self, data):
        self._file = MemoryBytes(data)
        self.header = read_header(self._file)

    def read(self, k, begin, end, out):
        self._file.read_into(out[: end - begin], len(self.header.prefix) + self.header.tensors[k].begin + begin)
        return out[: end - begin]


def packed(data, threads=1):
    file = BytesIO()
    pack(BytesSource(data), file, threads=threads)
    return file.getvalue()


PLAIN = safetensors(metadata={"format": "pt", "ü": "\n"})
CONTAINER = packed(PLAIN)


def test_containers_restore_the_file_byte_by_byte():
    assert contents(CONTAINER) == PLAIN
    model = open_bytes(CONTAINER)
    used = {p.coding for p in model.index.parts}
    assert {"frame", "frame-float16", "frame-bfloat16", "zstd"} <= used
    names = {t.name: k for k, t in enumerate(model.header.tensors)}
    assert model.index.equal == {names["tied"]: names["weight"]} or model.index.equal == {
        names["weight"]: names["tied"]
    }
    assert len(CONTAINER) < 0.55 * len(PLAIN)


def test_containers_do_not_depend_on_threads():
    assert packed(PLAIN, threads=3) == CONTAINER


def test_containers_are_safetensors_files_of_frames():
    """A container is a .safetensors file: any reader returns the frame of a large tensor, for codec.decode."""
    entries = load(CONTAINER)
    assert {x.dtype.name for x in entries.values()} == {"uint8"}
    assert {GROUPS, INDEX, "basis", "half"} < set(entries)
    _, shape, values = tensors()["half"]
    assert codec.decode(entries["half"]).astype(np.float32).tobytes() == values
    assert codec.decode(entries["half"]).shape == shape


def test_containers_without_zstandard(monkeypatch):
    """Without the package zstandard, zlib compresses repeated values; a container that needs zstandard is an error."""
    monkeypatch.setattr(parts, "_zstandard", lambda: None)
    other = packed(PLAIN)
    assert contents(other) == PLAIN
    assert "deflate" in {p.coding for p in open_bytes(other).index.parts}
    with pytest.raises(codec.EngineError, match="pip install zstandard"):
        contents(CONTAINER)


def test_large_tensors_are_cut_into_rows(monkeypatch):
    monkeypatch.setattr(packing, "_STEP", 10_000)
    data = safetensors({"w": tensors()["weight"], "flat": ("F32", (1, 38400), tensors()["weight"][2][::-1])})
    container = packed(data)
    assert contents(container) == data
    model = open_bytes(container)
    assert [p.size for p in model.index.stored_as(0)[:2]] == [19 * 512] * 2
    out = np.zeros(30_000, np.uint8)
    model.read(0, 5_001, out)
    assert out.tobytes() == tensors()["weight"][2][5_001:35_001]


RANDOM = np.random.default_rng(0).standard_normal(20_000).astype(np.float32).tobytes()
ODD = {
    "names": {name: ("F32", (20_000,), RANDOM) for name in ("codec.index", "codec.groups", "", "ü\n")},
    "no tensors": {},
    "no values": {"empty": ("F32", (0,), b"")},
    "many dimensions": {"x": ("F32", (1,) * 9 + (20_000,), RANDOM)},
    "zeros": {"x": ("F32", (100_000,), bytes(400_000)), "y": ("I64", (20_000,), bytes(160_000))},
    "quiet NaN": {"x": ("F32", (20_000,), np.full(20_000, 0x7FC02000, np.uint32).tobytes())},
    "signaling NaN": {"x": ("F32", (20_000,), np.full(20_000, 0x7F802000, np.uint32).tobytes())},
    "double": {"x": ("F64", (100, 100), RANDOM)},
    "float8": {"x": ("F8_E4M3", (80_000,), RANDOM)},
    "unknown": {"x": ("F6_E2M3", (7, 3), RANDOM)},
    "odd": {"x": ("U8", (79_999,), RANDOM[1:])},
}


@pytest.mark.parametrize("tensors", ODD.values(), ids=list(ODD))
def test_odd_files_are_restored(tensors):
    data = safetensors(tensors)
    assert contents(packed(data)) == data


@settings(max_examples=N_EXAMPLES, deadline=None)
@given(st.integers(0, len(CONTAINER) - 1), st.integers(1, 255), st.booleans())
def test_damaged_containers_are_errors_or_harmless(at, flip, cut):
    """A container with a changed byte, or truncated, either restores the packed file or is an error."""
    bad = bytearray(CONTAINER[:at] if cut else CONTAINER)
    if not cut:
        bad[at] ^= flip
    try:
        assert contents(bytes(bad)) == PLAIN
    except codec.CodecError:
        return


def test_every_damaged_byte_of_parts_and_index_is_found():
    start = len(read_header(MemoryBytes(CONTAINER)).prefix)
    for at in range(start, len(CONTAINER), max(1, (len(CONTAINER) - start) // N_DAMAGED)):
        bad = bytearray(CONTAINER)
        bad[at] ^= 0x10
        with pytest.raises(codec.FrameError):
            contents(bytes(bad))


def changed(path, value):
    """Return the container with one value of its index changed, and digests recomputed."""
    index, data = taken_apart(CONTAINER)
    index = copy.deepcopy(index)
    place = index
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return forged(index, data)


def test_forging_itself_is_no_error():
    assert contents(forged(*taken_apart(CONTAINER))) == PLAIN


ROW = ["parts", 0]
FORGED = [
    (["header"], "{"),
    (["header"], "[" * 100_000),
    (["header"], "{}"),
    (["header"], 5),
    (["header"], "\ud800"),
    (["header"], '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}'),
    (["header"], json.dumps({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}})),
    (["parts"], []),
    (["parts"], 7),
    (["parts", 0], []),
    ([*ROW, 0], []),
    ([*ROW, 0], [999]),
    ([*ROW, 0], [-1]),
    ([*ROW, 0], [1.5]),
    ([*ROW, 0], [0, 0]),
    ([*ROW, 0], None),
    ([*ROW, 1], 0),
    ([*ROW, 1], 1 << 62),
    ([*ROW, 1], "4"),
    ([*ROW, 2], "stored"),
    ([*ROW, 2], ["frame"]),
    ([*ROW, 2], "frame-float16"),
    ([*ROW, 2], "zstd-planes"),
    ([*ROW, 2], "deflate"),
    ([*ROW, 3], 1),
    ([*ROW, 3], -1),
    ([*ROW, 3], 1 << 62),
    ([*ROW, 4], "00"),
    ([*ROW, 4], 3),
    ([*ROW, 4], "xyz"),
    (["equal"], []),
    (["equal"], [[0, 0]]),
    (["equal"], [[0, 1 << 70]]),
    (["equal"], [[0]]),
    (["equal"], {}),
]


@pytest.mark.parametrize(("path", "value"), FORGED, ids=str)
def test_forged_indexes_are_errors(path, value):
    with pytest.raises(codec.FrameError):
        contents(changed(path, value))


def test_forged_containers_allocate_little():
    """An index that decompresses to a huge size, or a future version, is refused before memory is allocated."""
    _, data = taken_apart(CONTAINER)
    bomb = zlib.compress(b"[" + b" " * (100 << 20) + b"]", 9)
    with pytest.raises(codec.FrameError, match="too large"):
        open_bytes(forged(bomb, data))
    with pytest.raises(codec.UnsupportedError, match="version '2'"):
        open_bytes(forged(*taken_apart(CONTAINER), version="2"))
    huge = {"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}
    rows = [[[0], 1 << 23, "frame", len(data), "0" * 16]]
    with pytest.raises(codec.FrameError):
        open_bytes(forged({"header": json.dumps(huge), "parts": rows, "equal": []}, data))


def test_parts_of_hostile_compressors_are_errors():
    """A part that would decompress to more bytes than the index declares is refused before decompression."""
    out = np.empty(64, np.uint8)
    for coding, data in (
        ("zstd", zstandard.ZstdCompressor().compress(bytes(1 << 24))),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))),
        ("zstd", b"\x28\xb5\x2f\xfd"),
        ("zstd-planes", b""),
        ("deflate", zlib.compress(bytes(1 << 24))),
        ("deflate", zlib.compress(bytes(64)) + b"x"),
        ("deflate", zlib.compress(bytes(63))),
        ("deflate-planes", b"\x78"),
    ):
        with pytest.raises(codec.FrameError):
            parts.decode_part(coding, np.frombuffer(data, np.uint8), out, "float32", 0)


@settings(max_examples=N_EXAMPLES, deadline=None)
@given(st.binary(max_size=200))
def test_headers_are_parsed_or_refused(text):
    for header in (text, b'{"a":' + text + b"}"):
        try:
            assert parse(header).text == header
        except ValueError:
            continue


@pytest.mark.parametrize(
    "shape", [[0, 1 << 63], [1 << 30, 0, 1 << 30], [10**4000] * 2000], ids=["long", "empty", "slow"]
)
def test_shapes_that_no_array_can_have_are_refused(shape):
    """Tensors without values need no bytes. The product of many large dimensions would take hours."""
    with pytest.raises(ValueError, match="more values than a tensor can have"):
        parse(json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode())


def test_index_of_repetitive_names_is_restored():
    """A header whose compression ratio exceeds the reader's limit is stored uncompressed, and restored."""
    entries = {f"{'x' * 400}{i}": ("U8", (0,), b"") for i in range(4_000)}
    data = safetensors(entries)
    assert contents(packed(data)) == data
    assert len(data) < MAX_JSON
    assert isinstance(open_bytes(packed(data)).index, Index)


def test_tensors_in_memory_keep_values_and_order():
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    source = MemorySource.of({"b": np.int8([1]), "a": x, "c": np.asfortranarray(x)})
    file = BytesIO()
    pack(source, file)
    model = open_bytes(file.getvalue())
    assert [t.name for t in model.header.tensors] == ["a", "c", "b"]
    out = np.zeros(24, np.uint8)
    model.read(1, 0, out)
    assert np.array_equal(out.view(np.float32).reshape(2, 3), x)


def test_tensors_with_one_name_are_refused():
    """Keys 1 and "1" would be equal in the JSON text of a header, and a reader would refuse the file."""
    one, two = ("F32", (1,), np.zeros(4, np.uint8)), ("F32", (2,), np.zeros(8, np.uint8))
    with pytest.raises(codec.ArgumentError, match="two tensors have the name 'a'"):
        MemorySource([("a", *one), ("a", *two)])
    for name in (1, None, "__metadata__"):
        with pytest.raises(codec.ArgumentError, match="the name of a tensor must be a str other than '__metadata__'"):
            MemorySource.of({name: np.ones(3, np.float32), "1": np.ones(3, np.float32)})


@pytest.mark.parametrize("fault", ["twice", "header", "size"])
def test_packing_refuses_what_no_reader_accepts(fault, monkeypatch):
    """pack() parses the header and the index that it has made, before the file replaces another one."""
    source = BytesSource(PLAIN)
    if fault == "twice":
        text = source.header.text.replace(b'"tied"', b'"bias"')
        source.header = dataclasses.replace(source.header, text=text)
    elif fault == "header":
        source.header = dataclasses.replace(source.header, metadata={"format": "np"})
    else:
        monkeypatch.setattr(packing, "MAX_JSON", 100)
    file = BytesIO()
    with pytest.raises(
        codec.CodecError, match=r"cannot be packed, because (no reader would accept|a reader would find)"
    ):
        pack(source, file)
    assert file.getvalue()[:8] == bytes(8)  # the header is missing
