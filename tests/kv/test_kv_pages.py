"""KV cache pages: decoded values, memory layouts, fixed-size slots, and damaged or hostile input."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import codec
from codec.kv import PageCodec

SHAPE = (2, 2, 32, 3, 16)  # layers, sides (keys, values), tokens, heads, channels per head
RNG = np.random.default_rng(0)
NEAREST = {bits: codec.Quantize(bits, group_size=16, rounding="nearest", zero_point=True) for bits in (4, 8)}
SPECS = ["lossless", NEAREST[8], replace(NEAREST[8], zero_point=False), codec.Float8(group_size=16)]
SPECS += [codec.Float8("mxfp8_e4m3"), codec.Float4()]


def keys_and_values(shape=SHAPE, seed=0):
    """Return a random page like a model's: a few channels of the keys lie far from zero."""
    rng = np.random.default_rng(seed)
    page = rng.standard_normal(shape, np.float32)
    page[:, 0] += 20 * (rng.random(shape[3:], np.float32) > 0.8)
    return page


def bfloat16(page):
    return torch.from_numpy(page).to(torch.bfloat16)


def error(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn"])
def test_lossless_pages_keep_every_bit(dtype):
    pages = PageCodec(SHAPE, dtype)
    bits = RNG.integers(0, 256, (3, pages.nbytes), np.uint8).view(f"u{pages.nbytes // np.prod(SHAPE)}")
    given = list(bits.reshape(3, *SHAPE))
    data = pages.encode_many(given)
    assert all(len(d) <= pages.bound for d in data)
    again = pages.decode_many(data)
    assert all(np.array_equal(a.view(g.dtype), g) for a, g in zip(again, given, strict=True))


@pytest.mark.parametrize("key", SPECS, ids=str)
@pytest.mark.parametrize("value", SPECS[:2], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_frames_have_scales_along_tokens_for_keys_and_channels_for_values(key, value, dtype):
    """Pages decode as codec.decode(codec.encode()) of transposed keys and of values does, for any strides of a page."""
    dt = getattr(torch, dtype)
    page = torch.from_numpy(keys_and_values()).to(dt)
    pages = PageCodec(SHAPE, dtype, key=key, value=value)
    data = pages.encode(page)
    pool = page.permute(1, 3, 0, 2, 4).contiguous()  # sides, heads, layers, tokens, channels
    assert pages.encode(pool.permute(2, 0, 3, 1, 4)) == data
    out = torch.empty_like(pool)
    assert pages.decode(data, out=out.permute(2, 0, 3, 1, 4)) is not None
    assert out._version > 0
    out = out.permute(2, 0, 3, 1, 4)
    for layer in range(SHAPE[0]):
        k, v = (x.reshape(SHAPE[2], -1) for x in page[layer])
        k = k if key == "lossless" else k.T
        k, v = (codec.decode(codec.encode(x, spec), like=page) for x, spec in ((k, key), (v, value)))
        k = k if key == "lossless" else k.T
        assert torch.equal(out[layer].reshape(2, SHAPE[2], -1), torch.stack([k, v]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("group_size", [8, 16, 1024])
def test_zero_point_bounds_the_error_by_the_range_of_a_group(dtype, group_size):
    """The error is at most half a quantization step of the group, plus the rounding of the dtype."""
    dt = getattr(torch, dtype)
    page = torch.from_numpy(keys_and_values()).to(dt)
    spec = codec.Quantize(4, group_size=group_size, rounding="nearest", zero_point=True)
    pages = PageCodec(SHAPE, dtype, key=spec, value=spec)
    out = torch.empty_like(page)
    data = pages.encode(page)
    pages.decode(data, out=out)
    assert len(data) <= pages.bound
    exact, got = page.double(), out.double()
    for side, axis in ((0, 2), (1, 3)):
        x, y = (z[:, side].flatten(2).movedim(axis - 1, -1) for z in (exact, got))
        x, y = (z.unflatten(-1, (-1, min(group_size, z.shape[-1]))) for z in (x, y))
        span = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
        assert ((x - y).abs() <= span / 30 * 1.0001 + x.abs() * torch.finfo(dt).eps).all()


def test_zero_point_halves_the_error_of_keys_far_from_zero():
    page = keys_and_values()
    errors = {}
    for zero in (False, True):
        pages = PageCodec(SHAPE, "float32", key=replace(NEAREST[4], zero_point=zero))
        errors[zero] = error(pages.decode(pages.encode(page))[:, 0], page[:, 0])
    assert errors[True] < errors[False] / 2


def test_no_pages_are_no_error():
    pages = PageCodec(SHAPE, key=NEAREST[4])
    assert pages.encode_many([]) == pages.decode_many([]) == pages.decode_many([], out=[]) == []
    assert pages.encode_many([], out=np.empty((0, pages.bound), np.uint8)) == []


def test_pages_of_one_side_are_encoded_as_values():
    page = keys_and_values((3, 1, 32, 64))
    pages = PageCodec(page.shape, "float32", key="small", value=NEAREST[8])
    assert error(pages.decode(pages.encode(page)), page) < 0.01


def test_decoding_takes_pages_of_other_specs():
    page = bfloat16(keys_and_values())
    lossless = PageCodec(SHAPE)
    for zero in (False, True):
        key, value = (replace(NEAREST[bits], zero_point=zero) for bits in (8, 4))
        data = PageCodec(SHAPE, key=key, value=value).encode(page)
        out = lossless.decode(data, out=torch.empty_like(page))
        assert error(out.float().numpy(), page.float().numpy()) < 0.1


def test_pages_are_encoded_into_slots():
    pages = PageCodec(SHAPE, key=NEAREST[4])
    given = [bfloat16(keys_and_values(seed=i)) for i in range(3)]
    slots = np.zeros((3, pages.bound), np.uint8)
    used = pages.encode_many(given, out=slots)
    assert [bytes(u) for u in used] == pages.encode_many(given)
    assert [pages.page_nbytes(slot) for slot in slots] == [len(u) for u in used]
    for wrong in (np.zeros((3, 100), np.uint8), np.zeros((2, pages.bound), np.uint8), slots.astype(np.int16)):
        with pytest.raises(codec.ArgumentError):
            pages.encode_many(given, out=wrong)


def test_encoded_pages_do_not_depend_on_threads():
    pages = PageCodec(SHAPE, key=codec.Quantize(4), value=NEAREST[4])
    page = bfloat16(keys_and_values())
    assert len({pages.encode(page, options=codec.options(threads=n)) for n in (1, 2, 3)}) == 1


def test_damaged_pages_are_refused_and_leave_out_unchanged():
    shape = (2, 2, 48, 3, 16)  # 48 channels and 48 tokens: a frame and its transpose have the same shape
    page = bfloat16(keys_and_values(shape))
    for pages in (PageCodec(shape), PageCodec(shape, key=NEAREST[4], value=NEAREST[4])):
        good = pages.encode(page)
        out = [torch.ones_like(page), torch.ones_like(page)]
        for at in (*range(40), *range(41, len(good), 83)):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            for damaged in (bad, good[:at], good + b"\0"):
                with pytest.raises(codec.FrameError):
                    pages.decode_many([good, damaged], out=out)
        assert all((x == 1).all() for x in out)


def hostile():
    """Yield pages that an attacker might craft: each is valid except in one respect."""
    x = np.zeros((SHAPE[2], 48), np.float32)

    def page(frames, flags=0, ends=None):
        ends = np.cumsum([12 + 4 * len(frames), *map(len, frames)])[1:] if ends is None else np.array(ends)
        head, table = struct.pack("<4sBBH", b"CKVP", 1, flags, len(frames)), ends.astype("<u4").tobytes()
        return head + struct.pack("<I", zlib.crc32(head + table)) + table + b"".join(frames)

    frame = codec.encode(x)
    assert page([frame] * 4) == PageCodec(SHAPE, "float32").encode(np.zeros(SHAPE, np.float32))
    yield page([frame] * 3)
    yield page([frame] * 4, flags=1)
    yield page([frame] * 4, flags=2)
    yield page([frame] * 6)
    yield page([codec.encode(x[:1])] * 4)
    yield page([codec.encode(x.astype(np.float64))] * 4)
    yield page([codec.encode(x.view(np.int32))] * 4)
    yield page([codec.encode(x, codec.Delta(), base=x)] * 4)
    yield page([codec.encode(x[:0])] * 4)
    yield page([b""] * 4)
    yield page([frame] * 4, ends=[2**32 - 1] * 4)
    yield page([frame] * 4, ends=[0] * 4)
    yield page([frame] * 4, ends=[12 + 16 + 4 * len(frame)] * 4)
    yield b""
    yield page([])


@pytest.mark.parametrize("data", list(hostile()), ids=len)
def test_hostile_pages_are_refused(data):
    out = np.ones(SHAPE, np.float32)
    with pytest.raises(codec.FrameError):
        PageCodec(SHAPE, "float32").decode(data, out=out)
    assert (out == 1).all()


def test_wrong_pages_are_refused():
    pages = PageCodec(SHAPE)
    page = bfloat16(keys_and_values())
    for x in (page.half(), page[:1], page.to("meta"), torch._neg_view(page), page.tolist(), None, 1.0):
        with pytest.raises(codec.CodecError):
            pages.encode(x)
    data = pages.encode(page)
    frozen = np.zeros(SHAPE, np.uint16)
    frozen.flags.writeable = False
    for out in (frozen, page.float(), torch._neg_view(page), [page], np.zeros((2, *SHAPE), np.uint16)):
        with pytest.raises(codec.ArgumentError):
            pages.decode(data, out=out)
    with pytest.raises(codec.ArgumentError, match="shares memory"):
        pages.decode_many([data, data], out=[page, page])


def test_errors_of_values_name_page_layer_and_side():
    page = keys_and_values()
    page[1, 0, 3, 2, 1] = np.nan
    pages = PageCodec(SHAPE, "float32", key=NEAREST[4])
    with pytest.raises(codec.ArgumentError) as e:
        pages.encode_many([keys_and_values(), page])
    assert e.value.item == (1, 1, "key")
    good = pages.encode_many([keys_and_values()] * 2)
    bad = bytearray(good[1])
    bad[-9] ^= 1
    with pytest.raises(codec.ChecksumError) as e:
        pages.decode_many([good[0], bad])
    assert e.value.item == (1, 1, "value")


@pytest.mark.parametrize(
    "make",
    [
        lambda: PageCodec((2, 3, 4, 5)),
        lambda: PageCodec((2, 2, 64)),
        lambda: PageCodec((2, 2, 0, 64)),
        lambda: PageCodec(SHAPE, "complex64"),
        lambda: PageCodec(SHAPE, "uint8", key=NEAREST[4]),
        lambda: PageCodec(SHAPE, key=codec.Delta()),
        lambda: PageCodec(SHAPE, value=codec.Sign()),
        lambda: PageCodec(SHAPE, key="near"),
        lambda: PageCodec(SHAPE, key=codec.Quantize(4, group_size=12)),
        lambda: PageCodec(SHAPE, value=codec.Quantize(4, group_size=36)),
    ],
)
def test_wrong_parameters_are_refused(make):
    with pytest.raises((codec.ArgumentError, codec.SpecError)):
        make()
