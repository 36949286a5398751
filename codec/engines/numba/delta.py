# pyright: basic
"""Delta: encoding and decoding of blocks as changes of a base (docs/spec/format.md, section 10)."""

from codec.engines.numba.checksum import VALUES, digest_from
from codec.engines.numba.delta_decode import get_changes
from codec.engines.numba.delta_encode import put_changes
from codec.engines.numba.delta_values import load_bits, store_bits, work_of
from codec.engines.numba.floats import NOWHERE
from codec.engines.numba.jit import kernel
from codec.engines.numba.region import BAD_REGION, OK, close_block, close_region, open_block
from codec.engines.numba.words import U8, U64, copy

__all__ = ["BAD_REGION", "decode_blocks", "encode_blocks", "work_of"]

CHUNK = 1024  # bytes per chunk of a digest


@kernel
def encode_blocks(job, work, base, data, frame, limit, first, count, result):
    """Encode blocks [first, first + count) to regions from frame[result[0]] on.

    result[0] is set to the end of the regions, and the blocks' checksums are added to result[1]. ``base`` and ``data``
    are the bytes of base and tensor.
    """
    kind = work.kind
    for b in range(first, first + count):
        start = b * job.block
        m = min(job.block, job.n - start)
        old = base[job.size * start : job.size * (start + m)]
        new = data[job.size * start : job.size * (start + m)]
        load_bits(job.size, old, work.base)
        load_bits(job.size, new, work.new)
        changes = 0
        for i in range(m):
            if work.base[i] != work.new[i]:
                work.at[changes] = i
                changes += 1
        block, chunk = job.row_sums[b], job.size * start // CHUNK
        block.base, block.result = digest_from(old, VALUES, chunk), digest_from(new, VALUES, chunk)
        block.changes = changes
        size = 8
        if changes:
            size = close_region(work.region, put_changes(kind, work, m, changes, work.region))
        else:
            work.region[:8] = U8(0)
        status = close_block(frame, job, b, work.region, size, False, limit, U64(0), result)
        if status:
            return status
    return OK


@kernel
def decode_blocks(job, work, frame, checks, base, first, count, sink, checksum, fault):
    """Decode blocks [first, first + count) to the sink, or only validate them. The sink may be the base.

    With ``checks``, the blocks' checksums are compared and added to ``checksum[0]``, and digests of the values are
    stored in the job. A block is written only after it has been read completely, so base and sink may be the same
    memory. If the changes of a block are invalid, ``fault[3]`` is set to the block's index.
    """
    kind, c = work.kind, work.c
    for b in range(first, first + count):
        status = open_block(frame, job, b, checks, c, checksum, fault)
        if status:
            return status
        start = b * job.block
        m = min(job.block, job.n - start)
        old = base[job.size * start : job.size * (start + m)]
        load_bits(job.size, old, work.base)
        copy(work.new, work.base[:m])
        changes = get_changes(kind, work, m, frame, c, fault)
        if changes < 0:
            fault[3] = U64(b)
            return BAD_REGION
        new = work.bytes[: job.size * m]
        store_bits(job.size, work.new[:m], new)
        if checks:
            block, chunk = job.row_sums[b], job.size * start // CHUNK
            block.base, block.result = digest_from(old, VALUES, chunk), digest_from(new, VALUES, chunk)
            block.state = 1
        if sink.into != NOWHERE:
            copy(sink.data[job.size * start :], new)
    return OK
