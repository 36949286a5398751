"""Batches: each small tensor or frame is processed by one thread, and each large one by all threads."""

from collections.abc import Callable, Sequence
from typing import Any

from codec import _call
from codec._c import pool
from codec._c.library import lib
from codec._c.spec_structs import spec_struct
from codec._call import Call
from codec.engines.native.decoding import DecodePrepared, base_of, decode_prepared, prepare
from codec.engines.native.encoding import EncodeFilled, check_host, encode_filled, fill_context
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import CodecError
from codec.optimizers.arguments import LevelSource
from codec.tensors.overlap import check_all_apart
from codec.tensors.view import TensorView

Destination = tuple[TensorView, LevelSource | None, TensorView | None]  # view of the result, source of levels, base


def encode_many(requests: Sequence[EncodeRequest], make: EncodeFilled = encode_filled) -> list[Any]:
    """Return the frames of requests; the first request's `threads` applies to all.

    An error's `item` is the lowest index of a request that failed.
    """
    last: Any = None
    for i, r in enumerate(requests):
        if r.x.device != "cpu" or r.levels is not None or r.base is not None:
            at_item(i, check_host, r)
        if r.spec is not last:
            at_item(i, spec_struct, last := r.spec)
    plain = all(r.codebook is None and r.segments is None and r.levels is None and r.base is None for r in requests)
    frames: list[Any] = [None] * len(requests)

    def do(call: Call, i: int, threads: int) -> None:
        r = requests[i]
        if plain:
            call.context.stream = r.stream
        else:
            call.reset()
            fill_context(call, r)
        frames[i] = make(call, spec_struct(r.spec), r, threads)

    if requests:
        _spread(do, [r.x.nbytes for r in requests], requests[0].threads, ())
    return frames


def decode_many(requests: Sequence[DecodeRequest], make: DecodePrepared = decode_prepared) -> list[Any]:
    """Return one tensor for each request. Requests may differ only in frame, `out`, base and bound spec.

    An error's `item` is the lowest index of a request that failed.
    """
    call = _call.take()
    prepared = [at_item(i, prepare, call, r) for i, r in enumerate(requests)]
    _call.give(call)
    if not requests:
        return []
    flags = 0
    sizes = [v.nbytes for v, *_ in prepared]
    past = lib.CODEC_NONTEMPORAL if sum(sizes) >= lib.CODEC_UNCACHED_NBYTES else 0

    def do(call: Call, i: int, threads: int) -> None:
        v, _, levels, verify = prepared[i]
        call.forget_levels()
        call.context.flags = past | (flags or (verify and lib.CODEC_VERIFY_FIRST))
        make(call, requests[i], v, levels, threads)

    if any(r.out is not None for r in requests):
        made = zip(requests, prepared, strict=True)
        check_many_apart(requests, [(v, levels, base_of(r, v.dtype)) for r, (v, _, levels, _) in made])
        flags = lib.CODEC_CHECK_ONLY  # validate all frames before any destination is written
        _spread(do, sizes, requests[0].threads, requests[0].codebooks)
        flags = lib.CODEC_NO_CHECKSUM
    _spread(do, sizes, requests[0].threads, requests[0].codebooks)
    return [result for _, result, *_ in prepared]


def at_item(i: int, call: Callable[..., Any], *args: Any) -> Any:
    """Return call(*args). If it raises a CodecError, set the error's `item` to i."""
    try:
        return call(*args)
    except CodecError as e:
        e.item = i
        raise


def check_many_apart(requests: Sequence[DecodeRequest], made: Sequence[Destination]) -> None:
    """Raise ArgumentError if an `out` shares memory with another `out`, or with an input of another request.

    `made` has the destination of each request.
    """
    written: list[tuple[int, TensorView]] = []
    read: list[tuple[int, TensorView]] = []
    for i, (r, (v, levels, base)) in enumerate(zip(requests, made, strict=True)):
        read.append((i, r.frames[0]))
        read += [(i, array) for _, array in (levels.read if levels else [])]
        if base is not None:
            read.append((i, base))
        if r.out is not None:
            written.append((i, v))
    check_all_apart("out=", written, read)


def _spread(do: Callable[[Call, int, int], None], sizes: Sequence[int], asked: int | None, books: Any) -> None:
    """Run do(call, i, threads) for every item i, and raise the error of the lowest item that failed.

    `asked` is the requested number of threads, and `books` are the codebooks of all calls. An item that is larger than
    one thread's share of all bytes is processed by all threads, before the other items.
    """
    threads = pool.choose_threads(asked, sum(sizes))
    failed: dict[int, CodecError] = {}

    def share(indices: Sequence[int], each: int) -> None:
        call = _call.take()
        if books:
            call.set_codebooks(books)
        keep = call.keep
        for i in indices:
            try:
                do(call, i, each)
            except CodecError as e:
                failed[i] = e  # stop: only the error of the lowest item is raised, and later items are higher
                return
            call.keep = keep
        _call.give(call)

    if threads == 1:
        share(range(len(sizes)), 1)
    else:
        large = [i for i, nbytes in enumerate(sizes) if nbytes * threads > sum(sizes)]
        share(large, threads)
        shares = _cut([i for i in range(len(sizes)) if i not in set(large)], sizes, 4 * threads)
        pool.run(lambda i, _: share(shares[i], 1), len(shares), threads)
    if failed:
        first = min(failed)
        failed[first].item = first
        raise failed[first]


def _cut(indices: Sequence[int], sizes: Sequence[int], pieces: int) -> list[list[int]]:
    """Divide indices, in their order, into about `pieces` lists of similar total size in bytes."""
    most = sum(sizes[i] for i in indices) / pieces
    cuts: list[list[int]] = []
    room = 0.0
    for i in indices:
        if room <= 0:
            cuts.append([])
            room = most
        cuts[-1].append(i)
        room -= sizes[i]
    return cuts
