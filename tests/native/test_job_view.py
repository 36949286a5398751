"""External engines can read a job through codec_job_view: numpy decodes and encodes the blocks here."""

from types import SimpleNamespace

import numpy as np
import pytest

import codec
from codec._c.library import DTYPES, check, ffi, lib, new_bytes
from codec._c.spec_structs import spec_struct
from codec._call import new_tensor
from reference import decoder as oracle

MODEL_PART = np.dtype("u8,u8,u4,u4,u2,u2,u1,u1", align=True)
MODEL_PART.names = ("start", "count", "row", "nibbles_at", "base", "mean", "kind", "shifts")
ROW_PART = np.dtype("u8,u8,u8,u4,u4,2f4")
ROW_PART.names = ("start", "count", "first_block", "first_sum", "group_size", "scale")


def view_of(job):
    view = ffi.new("codec_view *")
    view.struct_nbytes = ffi.sizeof("codec_view")
    check(lib.codec_job_view(job, view))
    return view


def array(memory, a, dtype):
    """Return a numpy view of the array that `a`, a field of codec_view, describes in a job's memory."""
    assert a.count == 0 or np.dtype(dtype).itemsize == a.itemsize
    return np.frombuffer(memory, dtype, a.count, a.at)


def head_nbytes(frame):
    return 48 + 8 * frame[7] + int.from_bytes(frame[12:16], "little")


def planned(frame, given=None):
    """Plan decoding from header and side section alone (or `given` bytes); return job, plan and status."""
    like = codec.inspect(frame)
    sizes = ffi.new("size_t[2]")
    spec = spec_struct(like.spec)
    check(lib.codec_job_nbytes(spec, new_tensor(DTYPES[like.dtype], like.shape), sizes, sizes + 1))
    job, plan = new_bytes(sizes[0]), ffi.new("codec_plan *")
    head = frame[: head_nbytes(frame) if given is None else given]
    status = lib.codec_decode_plan(head, len(head), len(frame), ffi.NULL, job, sizes[0], plan)
    return job, plan, status


def gradient():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((300, 128)) * np.exp(rng.standard_normal((300, 1))) * np.exp(rng.standard_normal(128))
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def block_checksum(frame, view, b, at, end):
    data, m = oracle.digest(frame[at:end], 0x300), view.block_nvalues
    section = view.planes_offset
    for p in range(8):
        if view.fixed >> p & 1:
            first = section + b * m
            data += oracle.digest(frame[first : first + min(m, view.n - b * m)], 0x400 + p)
            section += view.plane_stride
    return oracle.mix((data ^ (b + 1) * oracle.GOLDEN) & oracle.MASK64)


def checksums_of(frame, view, nblocks):
    """Return the sum that blocks and directory contribute to the checksum, and the byte offsets where blocks end."""
    directory = np.frombuffer(frame, "<u4", 2 * nblocks, view.directory_offset).reshape(-1, 2)
    ends = [view.regions_offset, *(8 * int(e) for e in directory[:, 0])]
    checksums = sum(block_checksum(frame, view, b, ends[b], ends[b + 1]) for b in range(nblocks))
    return (checksums + oracle.digest(directory.tobytes(), 0x200)) & oracle.MASK64, ends


def test_blocks_decoded_by_numpy() -> None:
    x = gradient()
    frame = codec.encode(codec.view(x, "bfloat16"))
    job, plan, status = planned(frame)
    check(status)
    view, memory = view_of(job), ffi.buffer(job)
    assert (view.encoding, view.n, view.nblocks, view.coded & 1) == (0, x.size, plan.nblocks, 1)
    checksum, ends = checksums_of(frame, view, plan.nblocks)
    tables = array(memory, view.tables, "514u1")
    values, lengths, (stands_for_escape, first) = tables[0][:256], tables[0][256:512], tables[0][512:]
    coded = [oracle.ESCAPE if v == stands_for_escape else int(v) for v in values]
    book = SimpleNamespace(table=list(zip(coded, lengths, strict=True)), first=coded[0])
    assert values[0] == first
    (part,) = array(memory, view.model_parts, MODEL_PART)
    assert (part["kind"], part["count"], part["row"]) == (3, x.size, 128)
    rows = int(part["count"] // part["row"])
    offsets = array(memory, view.offsets, "i1")[2 * part["nibbles_at"] :].astype(np.int64)
    row, col = offsets[:rows], offsets[(rows + 1) // 2 * 2 :][: part["row"]]
    t = (16 * (int(part["base"]) + row[:, None] + col)).reshape(-1)
    low = np.frombuffer(frame, np.uint8, x.size, view.planes_offset)  # plane 1 is a fixed plane
    assert view.fixed == 2
    top = np.empty(x.size, np.uint8)
    for b in range(plan.nblocks):
        r = oracle.Reader(frame, ends[b], ends[b + 1])
        m = min(view.block_nvalues, x.size - b * view.block_nvalues)
        assert r.ints("I") == (2,)
        top[b * view.block_nvalues :][:m], _ = oracle.decode_lanes(book, r, m)
    u = top.astype(np.int64) << 7 | low & 0x7F
    p = np.where(u < 128, u, 128 + (u - 128 + t) % (32768 - 128))
    np.testing.assert_array_equal(p | (low.astype(np.int64) & 0x80) << 8, x.reshape(-1))
    assert lib.codec_decode_close(ffi.NULL, job, checksum) == lib.CODEC_OK
    assert lib.codec_decode_close(ffi.NULL, job, checksum ^ 1) == lib.CODEC_CHECKSUM


def test_plan_needs_header_and_side_section() -> None:
    frame = codec.encode(codec.view(gradient(), "bfloat16"))
    at = head_nbytes(frame)
    for given in (0, 47, 63, at - 1):
        assert planned(frame, given)[2] == lib.CODEC_TRUNCATED
    job, _, status = planned(frame, at)
    assert status == lib.CODEC_OK
    first = ffi.new("codec_range *", (0, 1))  # the job was planned without a destination, so its own steps are refused
    dst = new_tensor(DTYPES["bfloat16"], (300, 128), ffi.from_buffer(gradient()), 76800)
    work = new_bytes(1 << 20)
    status = lib.codec_decode_blocks(frame, len(frame), dst, ffi.NULL, job, first, work, len(work))
    assert status == lib.CODEC_BAD_ARGUMENT


@pytest.mark.parametrize("segments", [None, [(0, (100, 150)), (20000, (70, 200))]])
def test_sign_blocks_encoded_by_numpy(segments) -> None:
    """The library computes scales and parts, numpy the sign bits; the frame equals codec.encode's."""
    x = np.random.default_rng(1).standard_normal(50000).astype(np.float32)
    expected = bytes(codec.encode(codec.view(x, segments=segments), codec.Sign()))
    spec, t = spec_struct(codec.Sign()), new_tensor(DTYPES["float32"], x.shape, ffi.from_buffer(x), x.nbytes)
    context = ffi.new("codec_context *")
    context.struct_nbytes = ffi.sizeof("codec_context")
    keep = [{"offset": o, "rank": len(shape), "shape": list(shape)} for o, shape in segments or ()]
    if segments:
        context.segments = parts_given = ffi.new("codec_segment[]", keep)
        context.nsegments = len(parts_given)
    sizes, plan = ffi.new("size_t[2]"), ffi.new("codec_plan *")
    check(lib.codec_job_nbytes(spec, t, sizes, sizes + 1))
    job, frame = new_bytes(sizes[0]), bytearray(2 * x.nbytes)
    dst = ffi.from_buffer(frame)
    check(lib.codec_encode_open(spec, t, dst, len(frame), context, job, sizes[0], plan))
    # Refused: scales are not computed yet
    assert lib.codec_encode_head(job, dst, len(frame), sizes) == lib.CODEC_BAD_ARGUMENT
    check(lib.codec_encode_scan(t, context, job, 0, plan.nscans))
    check(lib.codec_encode_start(t, dst, len(frame), context, job, plan))
    view = view_of(job)
    parts = array(ffi.buffer(job), view.row_parts, ROW_PART)
    assert parts["count"].sum() == x.size
    at, blocks = view.regions_offset, []
    for p in parts:
        values = x[p["start"] :][: p["count"]]
        blocks += [
            np.packbits(~np.signbit(values[i : i + 16384]), bitorder="little") for i in range(0, len(values), 16384)
        ]
    assert len(blocks) == plan.nblocks
    for b, codes in enumerate(blocks):
        region = codes.tobytes() + bytes(-codes.size % 8)
        frame[at : at + len(region)] = region
        at += len(region)
        checksum = block_checksum(bytes(frame[:at]), view, b, at - len(region), at)
        entry = np.array([at // 8, checksum >> 32], "<u4").tobytes()
        frame[view.directory_offset + 8 * b : view.directory_offset + 8 * b + 8] = entry
    assert lib.codec_encode_head(job, dst, 60, sizes) == lib.CODEC_SHORT_OUTPUT
    check(lib.codec_encode_head(job, dst, len(frame), sizes))
    assert sizes[0] == view.directory_offset
    assert frame[16:32] == bytes(16)  # codec_encode_head leaves size and checksum 0
    checksum, _ = checksums_of(bytes(frame[:at]), view, plan.nblocks)
    check(lib.codec_encode_final_head(job, at, checksum, dst, len(frame)))
    assert bytes(frame[:at]) == expected
    codec.verify(expected)


@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Lossless(model="flat"), codec.Sign(), codec.Truncate(1)])
def test_job_opened_by_shape_alone(spec) -> None:
    """A job opened without data knows parts and header; all other steps are rejected."""
    x = np.random.default_rng(1).standard_normal((500, 100)).astype(np.float32)
    frame = bytes(codec.encode(x, spec))
    s, t = spec_struct(spec), new_tensor(DTYPES["float32"], x.shape, ffi.from_buffer(x), x.nbytes)
    nothing = new_tensor(DTYPES["float32"], x.shape)
    sizes, plan = ffi.new("size_t[2]"), ffi.new("codec_plan *")
    check(lib.codec_job_nbytes(s, t, sizes, sizes + 1))
    job, opened, head = (new_bytes(n) for n in (sizes[0], sizes[0], 2 * x.nbytes))
    assert lib.codec_encode_plan(s, nothing, ffi.NULL, job, sizes[0] - 1, plan) == lib.CODEC_SHORT_SCRATCH
    check(lib.codec_encode_plan(s, nothing, ffi.NULL, job, sizes[0], plan))
    assert plan.nblocks == codec.inspect(frame).nblocks
    check(lib.codec_encode_open(s, t, head, 2 * x.nbytes, ffi.NULL, opened, sizes[0], ffi.new("codec_plan *")))
    ours, theirs = view_of(job), view_of(opened)
    assert ours.row_parts.count == theirs.row_parts.count
    if theirs.model_parts.count:
        starts = [array(ffi.buffer(m), v.model_parts, MODEL_PART)["start"] for m, v in ((job, ours), (opened, theirs))]
        assert (starts[0] == starts[1]).all()
    assert lib.codec_encode_head(job, head, 63, sizes) == lib.CODEC_SHORT_OUTPUT
    check(lib.codec_encode_head(job, head, 64, sizes))
    assert sizes[0] == 64
    # Bytes of the header that depend on values: planes, sizes, checksum, flags
    decided = {10, 11, *range(12, 16), *range(16, 32), 40, 41}
    assert all(ffi.buffer(head)[i] == frame[i : i + 1] for i in range(64) if i not in decided)
    blocks, work = ffi.new("codec_range *", (0, 1, 4096)), new_bytes(1 << 20)
    steps = [
        lib.codec_encode_scan(t, ffi.NULL, job, 0, 0),
        lib.codec_encode_start(t, head, 2 * x.nbytes, ffi.NULL, job, plan),
        lib.codec_encode_blocks(t, head, 2 * x.nbytes, ffi.NULL, job, blocks, work, len(work)),
        lib.codec_encode_close(t, head, 2 * x.nbytes, ffi.NULL, job, blocks, 0, sizes),
        lib.codec_encode_final_head(job, 1 << 16, 0, head, 2 * x.nbytes),
    ]
    assert steps == [lib.CODEC_BAD_ARGUMENT] * 5


def test_job_of_a_stored_frame_opened_by_shape_alone() -> None:
    s, t = spec_struct(codec.Lossless()), new_tensor(DTYPES["float32"], (511,))
    sizes, plan = ffi.new("size_t[2]"), ffi.new("codec_plan *")
    check(lib.codec_job_nbytes(s, t, sizes, sizes + 1))
    job, head = new_bytes(sizes[0]), new_bytes(112)
    check(lib.codec_encode_plan(s, t, ffi.NULL, job, sizes[0], plan))
    assert plan.nblocks == 0
    check(lib.codec_encode_head(job, head, 112, sizes))
    assert ffi.buffer(head)[:16] == bytes(codec.encode(np.zeros(511, np.float32)))[:16]
