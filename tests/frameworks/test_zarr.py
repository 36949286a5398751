"""codec.integrations.numcodecs and .zarr pass numcodecs' own checks and Zarr's Hypothesis tests (formats 2 and 3)."""

import doctest
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import numcodecs
import numpy as np
import pytest
import torch
import zarr
import zarr.testing.strategies as zarr_strategies
from hypothesis import strategies as st
from numcodecs.tests import common

import codec
from codec.integrations import numcodecs as for_numcodecs
from codec.integrations import zarr as for_zarr
from support.documentation import blocks

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
HERE = Path(__file__).parent
RANDOM = np.random.default_rng(0)
LOSSLESS = [for_numcodecs.FrameCodec(), for_numcodecs.FrameCodec(codec.Lossless(4, "flat"))]
ARRAYS = [  # the arrays of numcodecs' compressor tests; also complex, big-endian, structured and transposed ones
    np.arange(1000, dtype="i4"),
    np.linspace(1000, 1001, 1000, dtype="f8"),
    RANDOM.normal(1000, 1, (100, 10)),
    RANDOM.integers(0, 2, 1000).astype(bool).reshape(100, 10, order="F"),
    RANDOM.choice([b"a", b"bb", b"ccc"], 1000).reshape(10, 10, 10),
    RANDOM.integers(0, 2**60, 1000).astype("u8").view("M8[ns]"),
    RANDOM.integers(0, 2**25, 1000).astype("u8").view("m8[m]"),
    RANDOM.integers(-(2**63), -(2**63) + 20, 1000).view("M8[m]"),
    RANDOM.normal(size=(20, 30)).astype("c8"),
    RANDOM.normal(size=(20, 30)).astype(">f4"),
    np.zeros(100, [("a", "<i4"), ("b", "<f8")]),
    RANDOM.normal(size=(10, 20, 5)).astype("f2").T,
]


@pytest.mark.parametrize("index", range(len(ARRAYS)))
def test_numcodecs_checks_of_lossless_compressors(index):
    for each in LOSSLESS:
        common.check_encode_decode(ARRAYS[index], each)


@pytest.mark.parametrize("make", [for_numcodecs.FrameCodec, for_zarr.FrameSerializer])
def test_configuration_is_json(make):
    for given in ((), ("small",), (codec.Float8(group_size=128),), (codec.TopK(1 / 8),), ("lossless", "bfloat16")):
        made = make(*given)
        if isinstance(made, for_numcodecs.FrameCodec):
            common.check_config(made)
        else:
            assert for_zarr.FrameSerializer.from_dict(json.loads(json.dumps(made.to_dict()))) == made
        assert pickle.loads(pickle.dumps(made)) == made
        assert hash(made) == hash(make(*given))
        assert repr(made).startswith(f"{make.__name__}(")
    assert make("small") != make()


def test_configuration_refuses_unknown_keys_and_values():
    for config, message in (
        ({"spec": "Quantize", "bit": 4}, r"Quantize has no field 'bit': its fields are bits, group_size"),
        ({"spec": "small", "level": 3}, "Quantize has no field 'level'"),
        ({"spec": "Quantize", "bits": 40}, "bits must be an int"),
        ({"spec": "zstd"}, "the presets are"),
        ({"spec": 3}, '"spec" must be the name of a preset'),
        ({"spec": "Delta"}, "needs a base"),
        ({"spec": "near"}, "needs the state of an optimizer"),
        ({"spec": "small", "dtype": "int32"}, "int32"),
        ({"dtype": "bfloat17"}, "bfloat17 cannot be encoded"),
    ):
        with pytest.raises(ValueError, match=message):
            numcodecs.get_codec({"id": "tensor-codec", **config})
        with pytest.raises(ValueError, match=message):
            for_zarr.FrameSerializer.from_dict({"name": "tensor-codec", "configuration": config})
    assert for_zarr.FrameSerializer.from_dict({"name": "tensor-codec"}) == for_zarr.FrameSerializer()


def test_numcodecs_checks_of_errors():
    each = for_numcodecs.FrameCodec()
    common.check_err_decode_object_buffer(each)
    common.check_err_encode_object_buffer(each)
    with pytest.raises(TypeError):
        each.encode(["foo"])
    with pytest.raises(ValueError, match="contiguous"):
        each.encode(np.arange(1000)[::2])
    with pytest.raises(ValueError, match="Quantize"):
        for_numcodecs.FrameCodec("small").encode(np.arange(1000))


def test_numcodecs_golden_frames(monkeypatch):
    """The frames in fixture/ decode to their arrays, and encoding the arrays gives the same bytes.

    numcodecs' check writes files that are missing in fixture/.
    """
    monkeypatch.chdir(HERE)
    frames = sorted(Path("fixture/tensor-codec").rglob("*.dat"))
    assert len(frames) == 6
    common.check_backwards_compatibility("tensor-codec", ARRAYS[2:5], LOSSLESS)
    for path in frames:
        array = np.load(f"fixture/tensor-codec/array.{path.name[8:10]}.npy")
        assert LOSSLESS[int(path.parent.name[-2:])].encode(array) == path.read_bytes()


def test_zarr_golden_array():
    """A Zarr array of two chunks that version 0.1 wrote is read, and written again with the same bytes."""
    folder = HERE / "fixture/array.zarr"
    expected = (np.arange(600, dtype="f4") / 7).reshape(20, 30)
    assert np.array_equal(zarr.open_array(folder, mode="r")[:], expected)
    again = zarr.storage.MemoryStore()
    serializer = for_zarr.FrameSerializer()
    zarr.create_array(again, data=expected, chunks=(10, 30), serializer=serializer, compressors=None)
    for name in ("c/0/0", "c/1/0"):
        assert again._store_dict[name].to_bytes() == (folder / name).read_bytes()


def test_lossy_scales_follow_rows():
    x = RANDOM.normal(size=(50, 256)).astype("f4") * 10.0 ** RANDOM.integers(-4, 4, (50, 1)).astype("f4")
    each = for_numcodecs.FrameCodec(codec.Float8())
    back = each.decode(each.encode(x)).view("f4").reshape(x.shape)
    assert (np.abs(back - x).max(1) < 0.05 * np.abs(x).max(1)).all()
    assert each.encode(x) == codec.encode(x, codec.Float8())


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_bfloat16_is_stored_as_uint16(zarr_format):
    x = torch.randn(300, 100).bfloat16().view(torch.uint16).numpy()
    made = {
        2: lambda: {"compressors": for_numcodecs.FrameCodec(dtype="bfloat16")},
        3: lambda: {"serializer": for_zarr.FrameSerializer(dtype="bfloat16"), "compressors": None},
    }[zarr_format]()
    store = {}
    a = zarr.create_array(store, data=x, chunks=(100, 100), zarr_format=zarr_format, **made)
    assert a.nbytes_stored() < 0.7 * x.nbytes
    assert np.array_equal(zarr.open_array(store)[:], x)


@pytest.mark.parametrize("dtype", ["f4", ">f4", "f2", "f8", "i8", ">i2", "u1", "bool", "c8", "M8[ns]", "S5", "U3"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_dtypes_of_zarr(dtype, zarr_format):
    x = (RANDOM.normal(size=(7, 30, 11)) * 100).astype("i8").astype(dtype)
    codecs = {2: {"compressors": for_numcodecs.FrameCodec()}, 3: {"serializer": for_zarr.FrameSerializer()}}[
        zarr_format
    ]
    store = {}
    a = zarr.create_array(store, shape=x.shape, dtype=x.dtype, chunks=(3, 16, 11), zarr_format=zarr_format, **codecs)
    a[:] = x
    a[2:5, 3] = x[2:5, 3]  # reads and writes parts of chunks
    assert np.array_equal(zarr.open_array(store)[:], x)
    assert zarr.open_array(store)[6, 2, 1] == x[6, 2, 1]


def test_shards_filters_and_fill_values():
    x = RANDOM.normal(size=(64, 64)).astype("f4")
    shards = zarr.create_array(
        {}, data=x, chunks=(16, 16), shards=(32, 32), serializer=for_zarr.FrameSerializer(),
        filters=[zarr.codecs.TransposeCodec(order=(1, 0))], compressors=[zarr.codecs.Crc32cCodec()],
    )  # fmt: skip
    assert np.array_equal(shards[5:50:3, 40:], x[5:50:3, 40:])
    empty = zarr.create_array(
        {}, shape=(9, 9), dtype="f4", chunks=(4, 4), fill_value=np.nan, serializer=for_zarr.FrameSerializer()
    )
    empty[:5] = 1
    assert np.isnan(empty[5:]).all()
    assert (empty[:5] == 1).all()
    scalar = zarr.create_array({}, shape=(), dtype="f8", serializer=for_zarr.FrameSerializer())
    scalar[()] = 2.5
    assert scalar[()] == 2.5


@hypothesis.settings(max_examples=50, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
def test_arrays_of_zarrs_own_strategies(data):
    x = data.draw(zarr_strategies.numpy_arrays())
    hypothesis.assume(not x.dtype.hasobject and x.dtype.kind != "T")
    serializer = for_zarr.FrameSerializer()
    chunks = tuple(max(1, data.draw(st.integers(1, max(1, n)))) for n in x.shape)
    a = zarr.create_array({}, shape=x.shape, dtype=x.dtype, chunks=chunks, serializer=serializer, compressors=None)
    a[...] = x
    assert a[...].tobytes() == x.astype(a.dtype).tobytes()


def test_dtypes_that_cannot_be_encoded_are_refused_when_the_array_is_made():
    for dtype, spec in ((str, "lossless"), ("i4", "small"), ("f8", "balanced")):
        with pytest.raises(ValueError, match=r"VLenUTF8Codec|int32|float64"):
            zarr.create_array({}, shape=(4,), dtype=dtype, serializer=for_zarr.FrameSerializer(spec))
    with pytest.raises(codec.ArgumentError, match="items of float32 have 4 bytes, those of dtype='bfloat16' have 2"):
        zarr.create_array({}, shape=(4,), dtype="f4", serializer=for_zarr.FrameSerializer(dtype="bfloat16"))


def stored(x, **how):
    """Store x as a Zarr array of one chunk; return the array, its store, and the chunk's key."""
    store = zarr.storage.MemoryStore()
    a = zarr.create_array(store, data=x, serializer=for_zarr.FrameSerializer(), compressors=None, chunks=x.shape, **how)
    (key,) = (k for k in store._store_dict if not k.endswith("json"))
    return a, store._store_dict, key


def test_damaged_chunks_are_errors():
    x = RANDOM.normal(size=(40, 50)).astype("f4")
    a, chunks, key = stored(x)
    good = chunks[key].to_bytes()
    make = type(chunks[key]).from_bytes
    chance = np.random.default_rng(1)
    frames = [
        codec.encode(y) for y in (x.T.copy(), x.ravel(), x.view("u4"), x.astype("f8"), np.zeros((1 << 14, 1 << 14)))
    ]
    frames += [codec.encode(x, codec.Delta(), base=x + 1), b"", b"x" * 100]
    frames += [good[: int(n)] for n in chance.integers(0, len(good), 20)]
    for _ in range(50):
        damaged = bytearray(good)
        damaged[chance.integers(len(good))] ^= 1 << chance.integers(8)
        frames.append(bytes(damaged))
    for frame in frames:
        chunks[key] = make(frame)
        with pytest.raises(codec.FrameError):
            a[:]
    chunks[key] = make(good)
    assert np.array_equal(a[:], x)
    each = for_numcodecs.FrameCodec()
    for frame in frames[3:]:
        out = np.ones(x.shape, "f4")
        with pytest.raises(codec.FrameError):
            each.decode(frame, out=out)
        assert (out == 1).all()
    zeros = codec.encode(np.zeros(1 << 31, np.uint8))
    with pytest.raises(codec.LimitError):
        each.decode(zeros)


def test_threads_share_a_codec():
    each, x = for_numcodecs.FrameCodec("balanced"), RANDOM.normal(size=(100, 1000)).astype("f4")
    want = each.encode(x)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: each.encode(x), range(64))) == {want}
        assert {bytes(y) for y in pool.map(each.decode, [want] * 64)} == {codec.decode(want).tobytes()}


def test_code_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for heading in ("Zarr format 3", "numcodecs and Zarr format 2"):
        for code in blocks(heading, "docs/guides/zarr.md"):
            exec(code, namespace)
    assert namespace["y"].shape == (1000, 1000)


def test_docstring_examples():
    for module in (for_numcodecs, for_zarr):
        found = doctest.testmod(module, extraglobs={"codec": codec})
        assert found.attempted
        assert not found.failed
