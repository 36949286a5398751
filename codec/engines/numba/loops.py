"""The functions of ``codec_engine.h`` that go over values, as C has them, for this engine's kernels."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from codec._c.library import lib
from codec.engines.numba import lossless, rows, truncate
from codec.engines.numba.floats import NOWHERE, Sink
from codec.engines.numba.memory import NOTHING, Array, memory_of
from codec.engines.numba.metric import fill_exponents
from codec.engines.numba.view import Job, view_job

_MUCH = 1 << 18  # values whose exponents of A are found at once


def _family(job: Job) -> Any:
    """The kernels of a job's codec."""
    return {lib.CODEC_LOSSLESS: lossless, lib.CODEC_TRUNCATE: truncate}.get(job.codec, rows)


def _error(context: Any, n: int) -> Array:
    """What was lost of earlier frames, if that is to be added."""
    feedback = context.flags & lib.CODEC_FEEDBACK
    return memory_of(context.residual, 4 * n) if feedback else NOTHING


def codec_encode_scan(src: Any, context: Any, job: Any, first: int, count: int) -> int:
    """Pieces of the tensor to what its scales are made from."""
    j = view_job(job)
    rows.scan(j, _family(j).work_of(j), memory_of(src.data, src.nbytes), _error(context, j.n), first, count)
    return 0


def codec_encode_blocks(
    src: Any,
    dst: Any,
    capacity: int,
    context: Any,
    job: Any,
    first: int,
    count: int,
    at: int,
    end: Any,
    seal: Any,
    work: Any,
    work_nbytes: int,
) -> int:
    """Blocks to regions. Memory to work in is this engine's own."""
    j = view_job(job)
    kernels = _family(j)
    data, frame, error = memory_of(src.data, src.nbytes), memory_of(dst, capacity), _error(context, j.n)
    mine, result = kernels.work_of(j), np.array([at, 0], np.uint64)
    status: int = 0
    if kernels is lossless:
        status = lossless.encode_blocks(j, mine, data, frame, capacity, first, count, result)
    elif kernels is rows:
        residual = memory_of(context.residual, 4 * j.n) if context.residual else NOTHING
        status = rows.encode_blocks(j, mine, data, error, residual, frame, capacity, first, count, result)
    else:
        levels = memory_of(context.levels, j.n) if context.levels else NOTHING
        for some, n, start, ea in _with_exponents(j, context, first, count):
            status = truncate.encode_blocks(j, mine, data, error, levels, ea, start, frame, capacity, some, n, result)
            if status:
                break
    end[0], seal[0] = int(result[0]), int(result[1])
    return status


def _with_exponents(j: Job, context: Any, first: int, count: int) -> Iterator[tuple[int, int, int, Array]]:
    """Blocks of Truncate, a few at a time: the first one, how many, its first value, exponents of A from there on."""
    each = max(1, _MUCH // j.block)
    needs = j.variant != truncate.FIXED and context.metric and (j.encoding or j.variant == truncate.SHARED)
    for b in range(first, first + count, each):
        n = min(each, first + count - b)
        start, ea = b * j.block, NOTHING
        if needs:
            ea = np.empty(min(n * j.block, j.n - start), np.uint8)
            fill_exponents(context, j.n, start, ea)
        yield b, n, start, ea


def _sink(j: Job, context: Any, dst: Any) -> Sink:
    """Where decoded values go; None: nowhere."""
    unscaled = bool(context.flags & lib.CODEC_UNSCALED) and j.codec == lib.CODEC_TERNARY
    return Sink(
        NOWHERE if dst is None else context.into,
        np.float32(context.weight),
        np.float32(context.divide),
        unscaled,
        unscaled and bool(context.flags & lib.CODEC_RESCALE),
        NOTHING if dst is None else memory_of(dst.data, dst.nbytes),
    )


def codec_decode_check(
    frame: Any, nbytes: int, context: Any, job: Any, first: int, count: int, seal: Any, work: Any, work_nbytes: int
) -> int:
    """Blocks through all their checks."""
    return _step(frame, nbytes, None, context, job, first, count, seal, work, work_nbytes)


def codec_decode_blocks(
    frame: Any,
    nbytes: int,
    dst: Any,
    context: Any,
    job: Any,
    first: int,
    count: int,
    seal: Any,
    work: Any,
    work_nbytes: int,
) -> int:
    """Blocks to a destination."""
    return _step(frame, nbytes, dst, context, job, first, count, seal, work, work_nbytes)


class _Decoding:
    """A frame's job, and what its kernels need."""

    def __init__(self, frame: Any, nbytes: int, context: Any, job: Any) -> None:
        self.job = view_job(job)
        self.context = context
        self.frame = memory_of(frame, nbytes)
        self.checks = not context.flags & lib.CODEC_NO_CHECKSUM
        self.kernels = _family(self.job)
        self.work = self.kernels.work_of(self.job)
        self.seal, self.fault = np.zeros(1, np.uint64), np.zeros(3, np.uint64)

    def run(self, first: int, count: int, sink: Sink) -> int:
        """Blocks to a sink; of an error the context's fault says where it is."""
        where = self.job, self.work, self.frame, self.checks
        status: int = 0
        if self.kernels is truncate:
            for some, n, start, ea in _with_exponents(self.job, self.context, first, count):
                status = truncate.decode_blocks(*where, ea, start, some, n, sink, self.seal, self.fault)
                if status:
                    break
        else:
            status = self.kernels.decode_blocks(*where, first, count, sink, self.seal, self.fault)
        if status and self.context.fault:
            fault = self.context.fault
            fault.offset, fault.found, fault.expected = (int(x) for x in self.fault)
        return status


def _step(
    frame: Any,
    nbytes: int,
    dst: Any,
    context: Any,
    job: Any,
    first: int,
    count: int,
    seal: Any,
    work: Any,
    work_nbytes: int,
) -> int:
    d = _Decoding(frame, nbytes, context, job)
    status = d.run(first, count, _sink(d.job, context, dst))
    if status == truncate.OTHER_STATE:  # unless the frame is damaged: the C library says so
        return lib.codec_decode_check(frame, nbytes, context, job, first, count, seal, work, work_nbytes)
    seal[0] = int(d.seal[0])
    return status


def into(i: int, op: int) -> int:
    """How the i-th frame of a reduction goes into the result."""
    if i == 0:
        return lib.CODEC_INTO_FLOAT32
    return lib.CODEC_INTO_MAX if op == lib.CODEC_REDUCE_MAX else lib.CODEC_INTO_ADD


_AT_ONCE = 8  # blocks: what frames are added to stays in the cache


def codec_reduce_blocks(
    frames: Any,
    nbytes: Any,
    count: int,
    op: int,
    dst: Any,
    context: Any,
    jobs: Any,
    first: int,
    nblocks: int,
    seals: Any,
    work: Any,
    work_nbytes: int,
) -> int:
    """Blocks of all frames in turn. Whether they match is the C library's to say."""
    status: int = lib.codec_reduce_blocks(
        frames, nbytes, count, op, dst, context, jobs, first, 0, seals, work, work_nbytes
    )
    if status:
        return status
    opened = [_Decoding(frames[i], nbytes[i], context, jobs[i]) for i in range(count)]
    scales = [d.job.row_parts["scale"].tobytes() for d in opened]
    ternary = opened[0].job.codec == lib.CODEC_TERNARY
    unscaled = ternary and count > 1 and op != lib.CODEC_REDUCE_MAX and all(s == scales[0] for s in scales)
    sinks = [
        Sink(
            into(i, op),
            np.float32(1),
            np.float32(count if op == lib.CODEC_REDUCE_MEAN and 1 < count == i + 1 else 0),
            unscaled,
            unscaled and i == count - 1,
            memory_of(dst.data, dst.nbytes),
        )
        for i in range(count)
    ]
    for b in range(first, first + nblocks, _AT_ONCE):
        for d, sink in zip(opened, sinks, strict=True):
            status = d.run(b, min(_AT_ONCE, first + nblocks - b), sink)
            if status:
                return status
    for i, d in enumerate(opened):
        seals[i] = int(d.seal[0])
    return 0
