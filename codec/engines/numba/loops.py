"""Replacements of the functions in ``codec_engine.h`` that process values, with the same signatures as in C."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from codec._c.library import ffi, lib
from codec.engines.numba import delta, lossless, rows, topk, truncate
from codec.engines.numba.floats import NOWHERE, Sink
from codec.engines.numba.memory import NOTHING, Array, memory_of
from codec.engines.numba.metric import fill_exponents
from codec.engines.numba.view import ViewFields, view_job

_VALUES_PER_STEP = 1 << 18  # number of values for which exponents of A are computed per step


def _family(job: ViewFields) -> Any:
    """Return the module with the kernels of a job's codec."""
    others = {
        lib.CODEC_LOSSLESS: lossless,
        lib.CODEC_TRUNCATE: truncate,
        lib.CODEC_DELTA: delta,
        lib.CODEC_TOPK: topk,
    }
    return others.get(job.codec, rows)


def _base(context: Any) -> Array:
    """Return the bytes of the base that Delta's context contains."""
    return memory_of(context.base.data, context.base.nbytes)


def _feedback(context: Any, n: int) -> Array:
    """Return the residuals to add to the tensor's `n` values; an empty array without CODEC_FEEDBACK."""
    feedback = context.flags & lib.CODEC_FEEDBACK
    return memory_of(context.residual, 4 * n) if feedback else NOTHING


def codec_encode_scan(src: Any, context: Any, job: Any, first: int, count: int) -> int:
    """Scan pieces [first, first + count) of the tensor: compute the sums from which the C library computes scales."""
    j = view_job(job)
    kernels, data, feedback = _family(j), memory_of(src.data, src.nbytes), _feedback(context, j.n)
    if kernels is lossless:
        return lib.codec_encode_scan(src, context, job, first, count)  # the C library chooses the scale model
    kernels.scan(j, kernels.work_of(j), data, feedback, first, count)
    return 0


def codec_encode_blocks(
    src: Any, dst: Any, capacity: int, context: Any, job: Any, blocks: Any, work: Any, work_nbytes: int
) -> int:
    """Encode a range of blocks to regions. ``work`` is not used: this engine allocates its own buffers."""
    j = view_job(job)
    kernels, first, count = _family(j), blocks.first, blocks.count
    data, frame, feedback = memory_of(src.data, src.nbytes), memory_of(dst, capacity), _feedback(context, j.n)
    own_work, result = kernels.work_of(j), np.array([blocks.at, 0], np.uint64)
    status: int = 0
    if kernels is lossless:
        status = lossless.encode_blocks(j, own_work, data, frame, capacity, first, count, result)
    elif kernels is delta:
        status = delta.encode_blocks(j, own_work, _base(context), data, frame, capacity, first, count, result)
    elif kernels in (rows, topk):
        residual = memory_of(context.residual, 4 * j.n) if context.residual else NOTHING
        status = kernels.encode_blocks(j, own_work, data, feedback, residual, frame, capacity, first, count, result)
    else:
        levels = memory_of(context.levels, j.n) if context.levels else NOTHING
        for some, n, start, ea in _with_exponents(j, context, first, count):
            status = truncate.encode_blocks(
                j, own_work, data, feedback, levels, ea, start, frame, capacity, some, n, result
            )
            if status:
                break
    blocks.end, blocks.checksum = int(result[0]), int(result[1])
    return status


def _with_exponents(j: ViewFields, context: Any, first: int, count: int) -> Iterator[tuple[int, int, int, Array]]:
    """Divide Truncate's blocks into ranges, and yield each with the exponents of A for its values.

    An item is (first block, number of blocks, index of the first value, exponents of A from that value on).
    """
    each = max(1, _VALUES_PER_STEP // j.block)
    needs = j.variant != truncate.FIXED and context.metric and (j.encoding or j.variant == truncate.SHARED)
    for b in range(first, first + count, each):
        n = min(each, first + count - b)
        start, ea = b * j.block, NOTHING
        if needs:
            ea = np.empty(min(n * j.block, j.n - start), np.uint8)
            fill_exponents(context, j.n, start, ea)
        yield b, n, start, ea


def _sink(context: Any, dst: Any) -> Sink:
    """Return the destination of decoded values; if ``dst`` is None, blocks are only validated."""
    if dst is None:
        return _sink_of(NOWHERE, 1, 0, NOTHING)
    return _sink_of(context.into, context.weight, context.divide, memory_of(dst.data, dst.nbytes))


def _sink_of(into: int, weight: float, divide: float, data: Any) -> Sink:
    """Return the sink of a CODEC_INTO value: Ternary's codes are values without their scale."""
    codes = lib.CODEC_INTO_CODES <= into <= lib.CODEC_INTO_SCALE_CODES
    rescale = into == lib.CODEC_INTO_SCALE_CODES
    if codes:
        into, weight = lib.CODEC_INTO_FLOAT32 if into == lib.CODEC_INTO_CODES else lib.CODEC_INTO_ADD, 1
    return Sink(into, np.float32(weight), np.float32(divide), codes, rescale, data)


def codec_decode_check(
    frame: Any, nbytes: int, context: Any, job: Any, blocks: Any, work: Any, work_nbytes: int
) -> int:
    """Replace the C function: validate a range of blocks of a frame without decoding their values."""
    return _step(frame, nbytes, None, context, job, blocks, work, work_nbytes)


def codec_decode_blocks(
    frame: Any, nbytes: int, dst: Any, context: Any, job: Any, blocks: Any, work: Any, work_nbytes: int
) -> int:
    """Replace the C function: decode a range of blocks of a frame to ``dst``."""
    return _step(frame, nbytes, dst, context, job, blocks, work, work_nbytes)


class _Decoding:
    """Decoding job of a frame, with the buffers of its kernels."""

    def __init__(self, frame: Any, nbytes: int, context: Any, job: Any) -> None:
        self.job = view_job(job)
        self.context = context
        self.frame = memory_of(frame, nbytes)
        self.checks = not context.flags & lib.CODEC_NO_CHECKSUM
        self.kernels = _family(self.job)
        self.work = self.kernels.work_of(self.job)
        self.checksum, self.fault = np.zeros(1, np.uint64), np.zeros(4, np.uint64)

    def run(self, first: int, count: int, sink: Sink) -> int:
        """Decode blocks to a sink, and return a status; on failure, store the details in the context's fault."""
        args = self.job, self.work, self.frame, self.checks
        status: int = 0
        if self.kernels is truncate:
            for some, n, start, ea in _with_exponents(self.job, self.context, first, count):
                status = truncate.decode_blocks(*args, ea, start, some, n, sink, self.checksum, self.fault)
                if status:
                    break
        elif self.kernels is delta:
            status = delta.decode_blocks(*args, _base(self.context), first, count, sink, self.checksum, self.fault)
        else:
            status = self.kernels.decode_blocks(*args, first, count, sink, self.checksum, self.fault)
        if status and self.context.fault:
            fault = self.context.fault
            fault.offset, fault.found, fault.expected = (int(x) for x in self.fault[:3])
        return status


def _step(frame: Any, nbytes: int, dst: Any, context: Any, job: Any, blocks: Any, work: Any, work_nbytes: int) -> int:
    """Decode a range of blocks to ``dst``; if ``dst`` is None, only validate the blocks."""
    d = _Decoding(frame, nbytes, context, job)
    status = d.run(blocks.first, blocks.count, _sink(context, dst))
    # The cause may be a damaged frame, or a wrong state or base. The C library decodes again to determine the cause.
    again = None
    if status == truncate.OTHER_STATE:
        again = blocks
    elif status == delta.BAD_REGION and d.kernels is delta and d.checks:
        again = ffi.new("codec_range *", (int(d.fault[3]), 1))  # not earlier blocks: they may be overwritten
    if again is not None:
        return lib.codec_decode_check(frame, nbytes, context, job, again, work, work_nbytes) or status
    blocks.checksum = int(d.checksum[0])
    return status


def into(i: int, op: int) -> int:
    """Return the CODEC_INTO value with which frame i of a reduction is combined with the result so far."""
    if op == lib.CODEC_REDUCE_CODES:
        return lib.CODEC_INTO_ADD_CODES if i else lib.CODEC_INTO_CODES
    if i == 0:
        return lib.CODEC_INTO_FLOAT32
    return lib.CODEC_INTO_MAX if op == lib.CODEC_REDUCE_MAX else lib.CODEC_INTO_ADD


_BLOCKS_PER_STEP = 8  # blocks decoded per frame and step; their part of the result stays in the cache


def codec_reduce_blocks(
    reduction: Any, dst: Any, context: Any, blocks: Any, checksums: Any, work: Any, work_nbytes: int
) -> int:
    """Reduce a range of blocks of all frames; the C library checks that the frames match."""
    none = ffi.new("codec_range *", (blocks.first, 0))
    status: int = lib.codec_reduce_blocks(reduction, dst, context, none, checksums, work, work_nbytes)
    if status:
        return status
    count, op, end = reduction.count, reduction.op, blocks.first + blocks.count
    opened = [_Decoding(reduction.frames[i], reduction.nbytes[i], context, reduction.jobs[i]) for i in range(count)]
    scales = [d.job.row_parts["scale"].tobytes() for d in opened]
    ternary = bool(opened[0].job.traits & lib.CODEC_TRAIT_SUMS)
    codes = ternary and count > 1 and op != lib.CODEC_REDUCE_MAX and all(s == scales[0] for s in scales)
    how = [into(i, lib.CODEC_REDUCE_CODES if codes else op) for i in range(count)]
    if codes:
        how[-1] = lib.CODEC_INTO_SCALE_CODES
    divide = [0] * (count - 1) + [count if op == lib.CODEC_REDUCE_MEAN and count > 1 else 0]
    data = memory_of(dst.data, dst.nbytes)
    sinks = [_sink_of(each, 1, by, data) for each, by in zip(how, divide, strict=True)]
    for b in range(blocks.first, end, _BLOCKS_PER_STEP):
        for d, sink in zip(opened, sinks, strict=True):
            status = d.run(b, min(_BLOCKS_PER_STEP, end - b), sink)
            if status:
                return status
    for i, d in enumerate(opened):
        checksums[i] = int(d.checksum[0])
    return 0
