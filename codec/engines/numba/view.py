"""View of a C library's job for kernels: scalar fields, and numpy arrays that share the job's memory."""

from typing import Any, NamedTuple

import numpy as np

from codec._c.library import DTYPE_NAMES, ITEMSIZE, check, ffi, lib

Array = np.ndarray[Any, Any]

_MODEL_PART = np.dtype(
    [
        ("start", "u8"),
        ("count", "u8"),
        ("row", "u4"),
        ("nibbles_at", "u4"),
        ("base", "u2"),
        ("mean", "u2"),
        ("kind", "u1"),
        ("shifts", "u1"),
    ],
    align=True,
)
_ROW_PART = np.dtype(
    [
        ("start", "u8"),
        ("count", "u8"),
        ("first_block", "u8"),
        ("first_sum", "u4"),
        ("group_size", "u4"),
        ("scale", "f4"),
        ("scale_below", "f4"),
    ]
)
_TABLE, _OFFSET = np.dtype("514u1"), np.dtype("i1")
_ROW_SUMS = np.dtype([("sum0", "f8"), ("sum1", "f8"), ("negative", "u4"), ("max", "u4")])
_DELTA_BLOCK = np.dtype([("base", "u8"), ("result", "u8"), ("changes", "u4"), ("state", "u4"), ("reserved", "u4", 4)])
_SUMS = {lib.CODEC_DELTA: _DELTA_BLOCK, lib.CODEC_TOPK: np.dtype("u4")}  # other codecs: _ROW_SUMS
_OCTAVES = {
    **{"float32": 128, "float64": 16, "bfloat16": 128, "float16": 1024},
    **{f"float8_e4m3{s}": 2048 for s in ("fn", "fnuz")},
    **{f"float8_e5m2{s}": 1024 for s in ("", "fnuz")},
}


class ViewFields(NamedTuple):
    """Fields of ``codec_view``, under the same names, and properties of the dtype."""

    encoding: int
    codec: int
    dtype: int
    variant: int
    options: int
    bits: int
    group_size: int
    guard: int
    fixed: int
    coded: int
    halved: int
    n: int
    block: int  # number of values in a block
    frame_nbytes: int
    directory: int  # byte offset in the frame, as are `planes` and `regions`
    planes: int
    plane_stride: int
    regions: int
    seed: Any  # uint32
    stream: Any  # always uint64, so that kernels are compiled for a single type
    scale: Any  # float32
    clip: Any
    traits: int  # CODEC_TRAIT_* of the codec
    size: int  # size of a value in bytes
    octave: int  # patterns (15 bits: format.md, section 3) from x to 2x; 0: dtype without scale model
    tables: Array  # by plane: 514 uint8 of its code table
    parts: Array  # parts of the scale model
    offsets: Array  # int8 offsets of rows and columns
    row_parts: Array
    row_sums: Array  # by leaf: sums; Delta, by block: digests, numbers of changes; TopK, by block: largest magnitude


def view_job(job: Any) -> ViewFields:
    """Return the view of a job; its arrays share the job's memory."""
    v = ffi.new("codec_view *")
    v.struct_nbytes = ffi.sizeof("codec_view")
    check(lib.codec_job_view(job, v))
    memory = ffi.cast("uint8_t *", job)

    def array(a: Any, dtype: np.dtype[Any]) -> Array:
        if not a.count:
            return np.empty(0, dtype)
        assert a.itemsize == dtype.itemsize
        return np.frombuffer(ffi.buffer(memory + a.at, a.count * a.itemsize), dtype)

    name = DTYPE_NAMES[v.dtype]
    return ViewFields(
        v.encoding,
        v.codec,
        v.dtype,
        v.variant,
        v.options,
        v.bits,
        v.group_size,
        v.guard,
        v.fixed,
        v.coded,
        v.halved,
        v.n,
        v.block_nvalues,
        v.frame_nbytes,
        v.directory_offset,
        v.planes_offset,
        v.plane_stride,
        v.regions_offset,
        np.uint32(v.seed),
        np.uint64(v.stream),
        np.float32(v.scale),
        np.float32(v.clip),
        v.traits,
        ITEMSIZE[name],
        _OCTAVES.get(name, 0),
        array(v.tables, _TABLE),
        array(v.model_parts, _MODEL_PART),
        array(v.offsets, _OFFSET),
        array(v.row_parts, _ROW_PART),
        array(v.row_sums, _SUMS.get(v.codec, _ROW_SUMS)),
    )
