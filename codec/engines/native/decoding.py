"""Decoder of the native engine, for one thread or several."""

from collections.abc import Callable
from typing import Any

from codec import _call
from codec._c import pool
from codec._c.library import DTYPE_NAMES, check, ffi, lib
from codec._call import Call
from codec.engines import blockwise
from codec.engines.native.encoding import ME
from codec.engines.request import DecodeRequest
from codec.errors import ArgumentError, StateError, Status
from codec.inspection import check_frame, read_header
from codec.optimizers.arguments import LevelSource, level_source, set_levels
from codec.specs import BoundSpec
from codec.tensors.view import TensorView, empty, on_host, view_base, view_output

_SCRATCH, _SMALL_TENSOR = _call.SMALL_SCRATCH, _call.SMALL_TENSOR
_BAD_ARGUMENT = int(Status.BAD_ARGUMENT)
_NULL, _VERIFY_FIRST, _NONTEMPORAL = ffi.NULL, lib.CODEC_VERIFY_FIRST, lib.CODEC_NONTEMPORAL
_CHECK_ONLY = lib.CODEC_CHECK_ONLY
_DELTA, _CODEC_AT = lib.CODEC_DELTA, 5  # codec number of Delta, and offset of the codec number in a frame
_MAX_HEADER: int = lib.CODEC_HEADER_NBYTES  # maximum size of a header in bytes

# If a tensor has more than _BOMB times its frame's size, plus _SMALL bytes, the frame is validated before the tensor is
# written. Validating such a small frame takes little time. Without validation, a damaged frame could fill memory before
# it is rejected.
_BOMB, _SMALL = 4, 1 << 20


# View of the destination, the object to return to the caller, the source of levels, and True if the frame must be
# validated before the destination is written.
Prepared = tuple[TensorView, Any, LevelSource | None, bool]
DecodePrepared = Callable[[Call, DecodeRequest, TensorView, LevelSource | None, int | None], None]


def decode(r: DecodeRequest, make: DecodePrepared | None = None) -> Any:
    """Decode a frame; return the request's `out`, or a new tensor of the type of its `like`.

    `make` is another engine's function that decodes the values; None: use the C library.
    """
    call = _call.take()
    v, result, levels, verify = prepare(call, r)
    if r.check_only:
        call.context.flags = _CHECK_ONLY
    elif verify or r.nontemporal:
        call.context.flags = (_VERIFY_FIRST if verify else 0) | (_NONTEMPORAL if r.nontemporal else 0)
    if r.codebooks:
        call.set_codebooks(r.codebooks)
    (make or decode_prepared)(call, r, v, levels, r.threads)
    _call.give(call)
    return result


def prepare(call: Call, r: DecodeRequest) -> Prepared:
    """Read the header of a frame, check the request against it, and allocate the tensor if the request has no `out`."""
    frame = r.frames[0]
    nbytes, info = frame.nbytes, call.info
    if frame.device != "cpu":
        on_host("the frame", frame, ME)
    status = lib.codec_inspect(frame.data, nbytes if nbytes < _MAX_HEADER else _MAX_HEADER, info)
    if status:
        check(status, info.fault)
    dtype = DTYPE_NAMES[info.dtype]
    shape = tuple(info.shape[0 : info.rank])
    tensor_nbytes: int = info.tensor_nbytes
    if info.frame_nbytes != nbytes or not (r.allows(tensor_nbytes) or is_bounded(info, r)):
        refuse(call, r, frame, TensorView(dtype, shape, _NULL, 0, None))
    m = _level_source(info, r.bound, frame) if r.bound is not None else None
    is_delta = info.spec.codec == _DELTA
    if is_delta:
        check_base(r, frame, dtype, shape)
    if r.out is None:
        result, v = empty(dtype, shape, r.like)
        return v, result, m, not is_delta and is_bomb(info)
    return on_host("out=", view_output(r.out, dtype), ME), r.out, m, r.verify_first


def is_bounded(info: Any, r: DecodeRequest) -> bool:
    """Return True if no size limit applies: the result is as large as the base, and the request sets no limit."""
    return info.spec.codec == _DELTA and r.base is not None and r.max_nbytes is None


def base_of(r: DecodeRequest, dtype: str) -> TensorView | None:
    """Return the view of the request's base; None without a base, or if the frame is not encoded by Delta."""
    if r.base is None or r.frames[0].device != "cpu" or ffi.cast("uint8_t *", r.frames[0].data)[_CODEC_AT] != _DELTA:
        return None
    return on_host("base=", view_base(r.base, dtype), ME)


def check_base(r: DecodeRequest, frame: TensorView, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise an error if the base is missing or has another dtype or shape; report a damaged frame before that."""
    base = None if r.base is None else view_base(r.base, dtype)
    if base is not None and base[:2] == (dtype, shape):
        return
    check_frame(frame)
    if base is None:
        raise StateError(
            "the frame of Delta holds the difference from a base tensor: pass that tensor as base=", Status.MISSING_BASE
        )
    raise ArgumentError(f"base= must be {dtype} of shape {shape}, as the frame, got {base.dtype} of shape {base.shape}")


def is_bomb(info: Any) -> bool:
    """Return True if a tensor is so much larger than its frame that the frame must be validated before decoding."""
    return info.tensor_nbytes > _BOMB * info.frame_nbytes + _SMALL


def refuse(call: Call, r: DecodeRequest, frame: TensorView, like: TensorView) -> None:
    """Raise the error of a frame that is truncated, has trailing bytes, or declares a tensor above the size limit."""
    tensor_nbytes: int = call.info.tensor_nbytes
    call.context.max_nbytes = most = 0 if r.out is not None else r.limit()
    if most or r.out is not None:  # a limit of 0 cannot be passed to the C library, in which it means no limit
        t = call.fill_tensor(like)
        check(lib.codec_decode(frame.data, frame.nbytes, t, call.context, _NULL, 0), call.fault)
    r.check_limit(tensor_nbytes)


def _level_source(info: Any, bound: BoundSpec, frame: TensorView) -> LevelSource:
    """Return the source of levels in host memory. If it does not fit, report a damaged frame first."""
    try:
        m = level_source(bound, info.n)
    except (ArgumentError, StateError):
        check_frame(frame)
        raise
    for name, v in m.read:
        on_host(name, v, ME)
    return m


def decode_prepared(
    call: Call, r: DecodeRequest, v: TensorView, levels: LevelSource | None, threads: int | None
) -> None:
    """Decode a frame into `v`. The call's context decides if values are stored, added or only validated."""
    frame = r.frames[0]
    call.keep = call.keep, r, v
    if levels is not None:
        set_levels(call, levels)
    base = None if r.base is None else base_of(r, v.dtype)
    if base is not None:
        call.set_base(base)
    t = call.fill_tensor(v)
    try:
        if v.nbytes > _SMALL_TENSOR or (threads is not None and threads > 1):
            _decode_large(call, frame, pool.choose_threads(threads, v.nbytes))
            return
        status = lib.codec_decode(frame.data, frame.nbytes, t, call.context, call.small_scratch, _SCRATCH)
        if status:
            check(status, call.fault)
    except ArgumentError as e:
        if e.code == _BAD_ARGUMENT:
            r.check_apart(v, levels, in_place=True, base=base)
        raise


def _decode_large(call: Call, frame: TensorView, threads: int) -> None:
    info, source, nbytes = read_header(frame), frame.data, frame.nbytes
    if threads > 1 and info.nblocks > 1:
        blockwise.decode(lib, call, info, source, nbytes, threads)
        return
    check(lib.codec_scratch(ffi.addressof(info.spec), blockwise.tensor_like(info), call.size))
    size = call.size[0]
    if call.context.flags & _VERIFY_FIRST:
        check(lib.codec_keep_nbytes(info, call.size))
        size += call.size[0]
    check(lib.codec_decode(source, nbytes, call.tensor, call.context, call.scratch(size), size), call.fault)


def read_whole(frame: TensorView) -> Any:
    """Return the header (codec_info) of a frame in host memory; raise FrameError unless it has exactly these bytes."""
    info = read_header(on_host("a frame", frame, ME))
    check_whole(info, frame)
    return info


def check_whole(info: Any, frame: TensorView) -> None:
    """Raise FrameError unless a frame has exactly the size that its header declares."""
    has, given = info.frame_nbytes, frame.nbytes
    if has != given:
        status = Status.TRUNCATED if given < has else Status.TRAILING
        check(status, ffi.new("codec_fault *", (min(has, given), given, has)))


def accumulate(r: DecodeRequest, weight: float, make: DecodePrepared | None = None) -> None:
    """Add `weight` times the values of a frame to the request's `out`. `make`: as for :func:`decode`."""
    frame = r.frames[0]
    info = read_whole(frame)
    m = _level_source(info, r.bound, frame) if r.bound is not None else None
    v = on_host("out=", view_output(r.out), ME)
    call = _call.take()
    context = call.context
    context.flags = _VERIFY_FIRST if r.verify_first else 0
    context.into, context.weight = lib.CODEC_INTO_ADD, weight
    if r.codebooks:
        call.set_codebooks(r.codebooks)
    (make or decode_prepared)(call, r, v, m, r.threads)
    _call.give(call)
