"""Encoding and decoding of single frames by several threads, for every engine that runs on the CPU.

A job opens a frame, processes ranges of blocks in parallel and closes the frame. The C library opens and closes jobs.
The functions that process values are attributes of the argument `loops`: ``codec_encode_scan``,
``codec_encode_blocks``, ``codec_decode_check``, ``codec_decode_blocks`` and ``codec_reduce_blocks``. `loops` is the C
library itself, or an object of another engine with functions of these names.
"""

from collections.abc import Sequence
from typing import Any

from codec import _call
from codec._c import library, pool
from codec._c.library import check, ffi, lib
from codec._call import Call, new_tensor
from codec.errors import CodecError, Status
from codec.tensors.view import TensorView

_SHORT_OUTPUT, _BAD_ARGUMENT = int(Status.SHORT_OUTPUT), int(Status.BAD_ARGUMENT)
_FIRST = lib.CODEC_VERIFY_FIRST | lib.CODEC_CHECK_ONLY


def encode(loops: Any, call: Call, spec: Any, dst: Any, capacity: int, threads: int) -> int | None:
    """Encode a tensor into dst and return the size of the frame in bytes.

    Return None if a range of blocks exceeds its part of dst because `capacity` bytes are too few. Then only dst has
    been written, and the caller can encode with one thread.
    """
    t, context = call.tensor, call.context  # `call` keeps both alive while other threads use them
    job_size, work_size, traits = ffi.new("size_t *"), ffi.new("size_t *"), ffi.new("uint32_t *")
    check(lib.codec_job_nbytes(spec, t, job_size, work_size))
    check(lib.codec_traits(spec, traits))
    job, plan = library.new_bytes(job_size[0]), ffi.new("codec_plan *")
    status = lib.codec_encode_open(spec, t, dst, capacity, context, job, job_size[0], plan)
    if status == _SHORT_OUTPUT:
        return None
    check(status)
    if plan.nscans:
        cuts = pool.ranges(plan.nscans, threads)

        def scan(i: int, _: int) -> int:
            return loops.codec_encode_scan(call.tensor, call.context, job, *cuts[i])

        for status in pool.run(scan, len(cuts), threads):
            check(status)
        status = lib.codec_encode_start(t, dst, capacity, context, job, plan)
        if status == _SHORT_OUTPUT:
            return None
        check(status)
    buffered = loops is lib and not traits[0] & lib.CODEC_TRAIT_FIXED_RATE
    regions = _Regions(plan, job, dst, capacity, threads, t.nbytes if buffered else 0)
    ranges, limits, nbytes = regions.ranges, regions.limits, work_size[0]
    works = [library.new_bytes(nbytes) for _ in range(min(threads, len(ranges)))]

    def task(i: int, w: int) -> int:
        regions.begin(i)
        status: int = loops.codec_encode_blocks(
            call.tensor, dst, limits[i], call.context, job, ranges + i, works[w], nbytes
        )
        if not status:
            regions.end(i)
        return status

    for status in pool.run(task, len(ranges), threads):
        if status in (_SHORT_OUTPUT, Status.LIMIT):
            return None
        check(status)
    status = lib.codec_encode_close(t, dst, capacity, context, job, ranges, len(ranges), call.size)
    if status == _SHORT_OUTPUT:
        return None
    check(status)
    return call.size[0]


class _Regions:
    """Ranges of blocks that threads encode, and their places in the frame.

    A range has a place once all earlier ranges are encoded. If a thread begins a range that has one, it writes there.
    Otherwise it writes to a buffer; when the place is known, the regions are copied while they are still in a cache. So
    hardly any pages of the frame are touched that the frame does not fill in the end.

    Without a free buffer, a range is written to the frame behind the preceding range, or to its slot, which begins
    where the range would if all regions had their maximum size; it is moved later.
    """

    def __init__(self, plan: Any, job: Any, dst: Any, capacity: int, threads: int, nbytes: int) -> None:
        """Cut ranges; `nbytes` is the tensor's size if regions are written to buffers, else 0."""
        self._job, self._dst = job, dst
        self._turn = [(0, plan.regions_at)]  # next range without a place, and that place; empty while a thread uses it
        room = plan.room if threads > 1 else 0
        cuts = pool.ranges(plan.nblocks, threads, nbytes) if room else [(0, plan.nblocks)][: plan.nblocks]
        self.ranges = ffi.new("codec_range[]", [(first, n, plan.regions_at + first * room) for first, n in cuts])
        self.limits = [min(r.at + r.count * room, capacity) if room else capacity for r in self.ranges]
        self._done = [False] * len(cuts)
        self._buffer: list[Any] = [None] * len(cuts)  # of each range; None: it is written to the frame
        most = room * max((n for _, n in cuts), default=0)
        count = min(2 * threads, len(cuts) - 1) if nbytes else 0
        self._free = [library.new_bytes(most) for _ in range(count)]

    def begin(self, i: int) -> None:
        """Choose the memory to which range i is written."""
        one = self.ranges[i]
        for turn, place in self._turn[:]:
            if turn == i:
                one.at = place
                return
        if i and self._done[i - 1] and self._buffer[i - 1] is None:
            one.at = self.ranges[i - 1].end
            return
        try:
            one.buffer = self._buffer[i] = self._free.pop()
        except IndexError:
            return

    def end(self, i: int) -> None:
        """Record that range i is encoded, and move all ranges whose places are now known.

        If another thread assigns places at this time, range i may be left to the next call, at last to
        codec_encode_close.
        """
        self._done[i] = True
        try:
            i, place = self._turn.pop()
        except IndexError:
            return
        copies: list[tuple[int, int]] = []
        while i < len(self._done) and self._done[i]:
            one = self.ranges[i]
            if self._buffer[i] is None:
                self._move(i, place)  # before later ranges get places, which may overlap this range's slot
            else:
                copies.append((i, place))
            place, i = place + one.end - one.at, i + 1
        self._turn.append((i, place))
        for i, place in copies:
            self._move(i, place)
            self._free.append(self._buffer[i])

    def _move(self, i: int, place: int) -> None:
        check(lib.codec_encode_move(self._job, self._dst, self.limits[i], self.ranges + i, place))


def _cut(nblocks: int, threads: int) -> Any:
    """Divide blocks into ranges for threads, and return them as an array of codec_range."""
    return ffi.new("codec_range[]", pool.ranges(nblocks, threads))


def tensor_like(info: Any) -> Any:
    """Return a codec_tensor with the dtype and shape of a frame, without data."""
    return new_tensor(info.dtype, tuple(info.shape[0 : info.rank]))


def decode(loops: Any, call: Call, info: Any, source: Any, nbytes: int, threads: int) -> None:
    """Decode a frame of several blocks into the call's tensor; with the call's flag CODEC_CHECK_ONLY, only check it."""
    context = call.context
    flags = context.flags
    context.flags &= ~_FIRST  # below, a separate pass validates all blocks before decoding
    keep = loops is lib and flags & _FIRST == lib.CODEC_VERIFY_FIRST
    job, work_nbytes = _open(call, context, info, source, nbytes, keep)
    if flags & _FIRST:
        _pass_over_blocks(loops, call, None, info, source, nbytes, job, work_nbytes, threads)
        context.flags |= lib.CODEC_NO_CHECKSUM
    if not flags & lib.CODEC_CHECK_ONLY:
        _pass_over_blocks(loops, call, call.tensor, info, source, nbytes, job, work_nbytes, threads)
    context.flags = flags


def find_changes(call: Call, frame: TensorView, positions: Any, values: Any, room: int, threads: int) -> int | None:
    """Check a frame of Delta against its base, and write its changes to arrays that have room for `room` of them.

    Parameters
    ----------
    call : Call
        Structs with the frame's header, and with the base, also as the tensor. The base is not written.
    positions, values : pointer
        Memory for the indices of the values that change, 4 bytes each, and for their new values.

    Returns
    -------
    int or None
        Number of changes; None: there are more than `room`, or more than one value in 8 changes in a block.
    """
    info, source, nbytes = call.info, frame.data, frame.nbytes
    call.context.flags &= ~_FIRST
    job, work_nbytes = _open(call, call.context, info, source, nbytes)
    if info.nblocks:
        _pass_over_blocks(lib, call, None, info, source, nbytes, job, work_nbytes, threads)
    status = lib.codec_decode_changes(job, positions, values, room, call.size)
    if status == _SHORT_OUTPUT:
        return None
    check(status)
    return call.size[0]


def _open(call: Call, context: Any, info: Any, source: Any, nbytes: int, keep: bool = False) -> tuple[Any, int]:
    """Open a decoding job; return it, and the size in bytes of each thread's work buffer.

    `keep`: the job has memory for the symbols that the C library's check decodes, which is faster if it decodes the
    blocks later.
    """
    job_size, work_size, kept = (ffi.new("size_t *") for _ in range(3))
    check(lib.codec_job_nbytes(ffi.addressof(info.spec), tensor_like(info), job_size, work_size))
    if keep:
        check(lib.codec_keep_nbytes(info, kept))
    size = job_size[0] + kept[0]
    job = library.new_bytes(size)
    check(lib.codec_decode_open(source, nbytes, call.tensor, context, job, size, ffi.NULL), call.fault)
    return job, work_size[0]


def _pass_over_blocks(
    loops: Any, call: Call, t: Any, info: Any, source: Any, nbytes: int, job: Any, work_nbytes: int, threads: int
) -> None:
    """Decode all blocks of a job, or only check them if `t` is None. Raise the error of the first invalid block."""
    ranges = _cut(info.nblocks, threads)
    faults = ffi.new("codec_fault[]", len(ranges))
    contexts = _call.copy_contexts(call.context, faults, len(ranges))
    works = [library.new_bytes(work_nbytes) for _ in range(min(threads, len(ranges)))]

    def task(i: int, w: int) -> int:
        # `call` keeps all memory alive that the contexts point to
        rest = contexts + i, job, ranges + i, works[w], work_nbytes
        if t is None:
            return loops.codec_decode_check(source, nbytes, *rest)
        return loops.codec_decode_blocks(source, nbytes, call.tensor, *rest)

    for i, status in enumerate(pool.run(task, len(ranges), threads)):
        check(status, faults[i])
    if not call.context.flags & lib.CODEC_NO_CHECKSUM:
        checksum = sum(r.checksum for r in ranges) % (1 << 64)
        check(lib.codec_decode_close(call.context, job, checksum), call.fault)


def reduce(loops: Any, call: Call, read: Sequence[tuple[Any, TensorView]], op: int, threads: int) -> bool:
    """Reduce frames into the call's tensor block by block. Return False if the frames' blocks differ in size."""
    pointers = ffi.new("void *[]", [frame.data for _, frame in read])
    sizes = ffi.new("size_t[]", [frame.nbytes for _, frame in read])
    context, flags = call.context, call.context.flags
    verify = flags & lib.CODEC_VERIFY_FIRST
    context.flags &= ~lib.CODEC_VERIFY_FIRST  # below, a separate pass validates all blocks before decoding
    own = _call.copy_contexts(context, call.fault, 1)
    own[0].into = lib.CODEC_INTO_CODES if op == lib.CODEC_REDUCE_CODES else lib.CODEC_INTO_FLOAT32
    opened: list[tuple[Any, int]] = []

    def check_all() -> None:
        for (info, frame), (job, work_nbytes) in zip(read, opened, strict=False):
            _pass_over_blocks(loops, call, None, info, frame.data, frame.nbytes, job, work_nbytes, threads)

    try:
        for info, frame in read:
            opened.append(_open(call, own, info, frame.data, frame.nbytes))
    except CodecError:
        check_all()  # if an earlier frame is also invalid, raises its error
        raise
    jobs, size = [job for job, _ in opened], max(work_nbytes for _, work_nbytes in opened)
    if verify:
        check_all()
        context.flags |= lib.CODEC_NO_CHECKSUM
    ranges, handles = _cut(read[0][0].nblocks, threads), ffi.new("void *[]", jobs)
    reduction = ffi.new("codec_reduction *", (pointers, sizes, handles, len(jobs), op))
    faults, checksums = ffi.new("codec_fault[]", len(ranges)), ffi.new("uint64_t[]", len(ranges) * len(read))
    contexts = _call.copy_contexts(call.context, faults, len(ranges))
    works = [library.new_bytes(size) for _ in range(min(threads, len(ranges)))]

    def task(i: int, w: int) -> int:
        # `call` and the variables of `reduce` keep all memory alive that the contexts and the reduction point to
        own = checksums + i * len(jobs)
        return loops.codec_reduce_blocks(reduction, call.tensor, contexts + i, ranges + i, own, works[w], size)

    done = pool.run(task, len(ranges), threads)
    if _BAD_ARGUMENT in done:
        context.flags = flags
        return False
    if any(done):
        check_all()
    for i, status in enumerate(done):
        check(status, faults[i])
    for j, job in enumerate(jobs):
        if not context.flags & lib.CODEC_NO_CHECKSUM:
            checksum = sum(checksums[k] for k in range(j, len(checksums), len(jobs)))
            check(lib.codec_decode_close(context, job, checksum % (1 << 64)), call.fault)
    return True
