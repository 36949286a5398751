"""Frames to their sum, mean or maximum."""

from typing import Any

from codec import core, pool, structs
from codec.core import check, ffi, lib
from codec.engines.native.decoding import open_job, pass_over_blocks, read_whole
from codec.engines.native.encoding import ME
from codec.engines.request import DecodeRequest
from codec.errors import CodecError, SpecError, Status
from codec.metrics.asked import asked
from codec.structs import Call
from codec.view import TensorView, empty, on_host, view_output

_BAD_ARGUMENT = int(Status.BAD_ARGUMENT)

_OPS = {"sum": lib.CODEC_REDUCE_SUM, "mean": lib.CODEC_REDUCE_MEAN, "max": lib.CODEC_REDUCE_MAX}


def reduce(r: DecodeRequest, op: str) -> Any:
    """The frames' sum, mean or maximum as float32: the request's `out`, or a new tensor of the kind of its `like`."""
    read = [(read_whole(frame), frame) for frame in r.frames]
    first = read[0][0]
    shape = tuple(first.shape[0 : first.rank])
    for info, _ in read:
        if tuple(info.shape[0 : info.rank]) != shape:
            for frame in r.frames:  # or one is damaged
                check(lib.codec_verify(frame.data, frame.nbytes))
            raise SpecError(f"frames of shapes {shape} and {tuple(info.shape[0 : info.rank])} cannot be reduced")
    r.check_limit(4 * first.n)
    m = asked(r.metric, r.state, first.n)
    for name, array in m.read if m else ():
        on_host(name, array, ME)
    if r.out is None:
        result, v = empty("float32", shape, r.like)
    else:
        result, v = r.out, on_host("out=", view_output(r.out), ME)
    call = structs.take()
    call.context.flags = lib.CODEC_VERIFY_FIRST if r.out is not None and r.check_first else 0
    call.keep = r, v
    if r.codebooks:
        call.set_codebooks(r.codebooks)
    if m is not None:
        call.set_metric(m)
    call.fill_tensor(v)
    try:
        _reduce_into(call, read, _OPS[op], pool.choose_threads(r.threads, v.nbytes * len(read)))
    except SpecError as e:
        if e.code == _BAD_ARGUMENT:
            r.check_apart(v, m, in_place=len(read) == 1)
        raise
    structs.give(call)
    return result


def _reduce_into(call: Call, read: list[tuple[Any, TensorView]], op: int, threads: int) -> None:
    pointers = ffi.new("void *[]", [frame.data for _, frame in read])
    sizes = ffi.new("size_t[]", [frame.nbytes for _, frame in read])
    nblocks = read[0][0].nblocks
    if threads > 1 and all(info.nblocks == nblocks > 1 for info, _ in read):
        done = _reduce_threads(call, read, pointers, sizes, op, threads)
        if done:
            return
    check(lib.codec_reduce_scratch(pointers, sizes, len(read), call.size))
    size = call.size[0]
    scratch = call.scratch(size)
    check(lib.codec_reduce(pointers, sizes, len(read), op, call.tensor, call.context, scratch, size), call.fault)


def _reduce_threads(
    call: Call, read: list[tuple[Any, TensorView]], pointers: Any, sizes: Any, op: int, threads: int
) -> bool:
    """False: the frames' blocks do not match, so that this must be done frame by frame."""
    context = call.context
    verify = context.flags & lib.CODEC_VERIFY_FIRST
    context.flags &= ~lib.CODEC_VERIFY_FIRST  # in steps, that is a pass of its own
    own = structs.copy_contexts(context, call.fault, 1)
    own[0].into = lib.CODEC_INTO_FLOAT32
    opened: list[tuple[Any, int]] = []

    def check_all() -> None:
        for (info, frame), (job, work_nbytes) in zip(read, opened, strict=False):
            pass_over_blocks(call, None, info, frame.data, frame.nbytes, job, work_nbytes, threads)

    try:
        for info, frame in read:
            opened.append(open_job(call, own, info, frame.data, frame.nbytes))
    except CodecError:
        check_all()  # of several faults, the first frame's is reported
        raise
    jobs, size = [job for job, _ in opened], max(work_nbytes for _, work_nbytes in opened)
    if verify:
        check_all()
        context.flags |= lib.CODEC_NO_CHECKSUM
    cuts = pool.ranges(read[0][0].nblocks, threads)
    handles = ffi.new("void *[]", jobs)
    faults, seals = ffi.new("codec_fault[]", len(cuts)), ffi.new("uint64_t[]", len(cuts) * len(read))
    contexts = structs.copy_contexts(call.context, faults, len(cuts))
    works = [core.new_bytes(size) for _ in range(min(threads, len(cuts)))]

    def task(i: int, w: int) -> int:
        # `call` and `jobs` keep alive what is pointed to
        seal = seals + i * len(jobs)
        return lib.codec_reduce_blocks(
            pointers, sizes, len(jobs), op, call.tensor, contexts + i, handles, *cuts[i], seal, works[w], size
        )

    done = pool.run(task, len(cuts), threads)
    if _BAD_ARGUMENT in done:
        context.flags = verify
        return False
    if any(done):
        check_all()
    for i, status in enumerate(done):
        check(status, faults[i])
    for j, job in enumerate(jobs):
        if not context.flags & lib.CODEC_NO_CHECKSUM:
            seal = sum(seals[k] for k in range(j, len(seals), len(jobs)))
            check(lib.codec_decode_close(context, job, seal % (1 << 64)), call.fault)
    return True
