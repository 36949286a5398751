"""Inspection and verification of frames without decoding."""

from dataclasses import dataclass
from typing import Any

from codec import _call
from codec._c import pool
from codec._c.library import DTYPE_NAMES, DTYPES, check, ffi, lib
from codec._c.spec_structs import spec_of
from codec.errors import ArgumentError
from codec.specs import Spec
from codec.tensors.overlap import check_iterated
from codec.tensors.view import TensorView, fetch, kind_of, view, view_bytes

_CHUNK = 1024  # bytes per chunk; a digest is the sum of the hashes of all chunks
_HEAD = 1 << 16  # bytes copied from a frame on a device: header and side section are shorter in most frames


@dataclass(frozen=True, slots=True)
class Info:
    """Header of a frame, from :func:`inspect`.

    Attributes
    ----------
    spec : Spec
        Spec of the encoder, without fields that decoding does not need: ``seed`` is 0, ``scale`` and ``clip`` are None.
        ``group_size`` is the number in use, even if the encoder derived it from the shape; it has its default if the
        tensor has no values, or if the frame has records of segments and its side section is missing. ``guard`` is the
        encoder's guard, plus the mantissa bits of the state's ``theta``, minus those of the tensor.
    dtype : str
        Name of the tensor's dtype, such as ``"bfloat16"``.
    shape : tuple of int
        Shape of the tensor.
    nbytes : int
        Size of the frame in bytes.
    tensor_nbytes : int
        Size of the tensor in bytes.
    sections : dict of str to (int, int)
        Offset and size in bytes of each section: "header"; "side", with codebooks and scale model; "directory", with
        the end of each block; "planes", with uncompressed bytes of the values; "regions", with the coded blocks, or the
        tensor if the frame is stored.
    version : int
        Version of the format.
    n : int
        Number of values.
    stored : bool
        True if the frame holds the tensor uncompressed.
    block : int
        Number of values per block; 0 in a stored frame, and if the codec's blocks are defined by groups.
    nblocks : int
        Number of blocks; 0 in a stored frame.
    checksum : int
        Checksum of the frame, 64 bits.
    codebook_id : int or None
        Id of the codebook that decoding needs; None if the frame contains its own.
    nsegments : int
        Number of segments with records in the frame.
    clipped : bool
        True if :class:`codec.Ternary` has clipped magnitudes. The frame does not contain the value of ``clip``.
    base_digest, result_digest : int or None
        :func:`digest` of the base of a frame of :class:`codec.Delta`, and of the decoded tensor. They are equal if no
        value has changed. None if the side section is missing, or for other codecs.
    scale : float or None
        Scale of all values of a frame of :class:`codec.Ternary`. ``spec.scale`` is None, because a frame does not
        record whether its scale was given or computed. To encode frames that :func:`codec.sum_codes` can add to this
        one, use ``dataclasses.replace(info.spec, scale=info.scale)``. None if there are no values, if segments have
        different scales, if the side section is missing, or for other codecs.
    """

    spec: Spec
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tensor_nbytes: int
    sections: dict[str, tuple[int, int]]
    version: int
    n: int
    stored: bool
    block: int
    nblocks: int
    checksum: int
    codebook_id: int | None
    nsegments: int
    clipped: bool
    scale: float | None
    base_digest: int | None
    result_digest: int | None

    @property
    def ratio(self) -> float:
        """Size of the frame divided by the size of the tensor."""
        return self.nbytes / max(1, self.tensor_nbytes)


def read_header(v: TensorView) -> Any:
    """Return the codec_info of a frame in host memory, which may be cut off after the header."""
    info = _call.new_info()
    check(lib.codec_inspect(v.data, v.nbytes, info), info.fault)
    return info


def verify(frame: Any) -> None:
    """Check header, sections, directory and all checksums of a frame, without decoding its values.

    Parameters
    ----------
    frame : bytes, buffer, array or tensor
        Whole frame.

    Raises
    ------
    FrameError
        The bytes are not a valid frame; ChecksumError, UnsupportedError and LimitError are subclasses.

    Examples
    --------
    >>> frame = bytearray(codec.encode(np.arange(1000.0)))
    >>> codec.verify(frame)
    >>> frame[-1] ^= 1
    >>> codec.verify(frame)
    Traceback (most recent call last):
    codec.errors.ChecksumError: ...
    """
    check_frame(fetch("a frame", view_bytes(frame)))


def check_frame(v: TensorView) -> None:
    """Raise FrameError if bytes in host memory are not a valid frame, as :func:`verify` does."""
    if lib.codec_verify(v.data, v.nbytes):
        # codec_decode also reports the fault's offset. The call always fails, because no frame has dtype 0.
        call = _call.take()
        status = lib.codec_decode(v.data, v.nbytes, _call.new_tensor(0, ()), call.context, ffi.NULL, 0)
        check(status, call.fault)


def inspect(frame: Any) -> Info:
    """Read the header of a frame.

    Parameters
    ----------
    frame : bytes, buffer, array or tensor
        Frame, or the first bytes of one: the header (at most 112 bytes) is enough, but ``codebook_id``, ``nsegments``,
        ``scale`` and digests are known only if the side section is included.

    Returns
    -------
    Info

    Raises
    ------
    FrameError
        The bytes are not the beginning of a valid frame. If there are too few, ``code`` is ``Status.TRUNCATED`` and
        ``expected`` is the number of bytes needed.

    Examples
    --------
    >>> info = codec.inspect(codec.encode(np.ones((3, 1000), np.float32), codec.Ternary("base3", clip=2.5)))
    >>> info.dtype, info.shape, info.clipped, info.spec
    ('float32', (3, 1000), True, Ternary(packing='base3', scale=None, clip=None, seed=0))
    """
    v = fetch("a frame", view_bytes(frame), _HEAD)
    info = read_header(v)
    sections = {
        "header": (0, info.side_offset),
        "side": (info.side_offset, info.side_nbytes),
        "directory": (info.directory_offset, info.directory_nbytes),
        "planes": (info.planes_offset, info.planes_nbytes),
        "regions": (info.regions_offset, info.regions_nbytes),
    }
    has_digests = info.spec.codec == lib.CODEC_DELTA and v.nbytes >= info.side_offset + info.side_nbytes
    return Info(
        spec=spec_of(info.spec),
        dtype=DTYPE_NAMES[info.dtype],
        shape=tuple(info.shape[i] for i in range(info.rank)),
        nbytes=info.frame_nbytes,
        tensor_nbytes=info.tensor_nbytes,
        sections=sections,
        version=info.version,
        n=info.n,
        stored=bool(info.stored),
        block=info.block_nvalues,
        nblocks=info.nblocks,
        checksum=info.checksum,
        codebook_id=info.codebook_id or None,
        nsegments=info.nsegments,
        clipped=bool(info.clipped),
        scale=float(info.scale) if info.spec.codec == lib.CODEC_TERNARY and info.scale >= 0 else None,
        base_digest=info.base_digest if has_digests else None,
        result_digest=info.result_digest if has_digests else None,
    )


def digest(x: Any) -> int:
    """Return the digest of a tensor's values, with which frames of :class:`codec.Delta` identify base and result.

    The digest depends only on the bits of the values, not on dtype or shape, and is equal on all machines. Sender and
    receiver can compare digests to find the update that must be applied next. A digest detects accidental differences;
    it does not protect against attackers. Different tensors have equal digests with a probability of 2^-64; of about
    2^-33 if they differ within a single KiB, in several values, and there only by one step between neighbouring
    numbers; never if they differ in one 32-bit word.

    Parameters
    ----------
    x : array, tensor or buffer
        Tensor as :func:`encode` takes it.

    Returns
    -------
    int
        64 bits.

    Raises
    ------
    ArgumentError
        x is not a tensor, or has a dtype that cannot be encoded.

    Examples
    --------
    >>> old, new = np.zeros(1000, np.float32), np.ones(1000, np.float32)
    >>> info = codec.inspect(codec.encode(new, codec.Delta(), base=old))
    >>> info.base_digest == codec.digest(old), info.result_digest == codec.digest(new)
    (True, True)
    """
    return digest_of(fetch("x", view(x)))


def digest_of(v: TensorView, threads: int | None = None) -> int:
    """Return the digest of a tensor in host memory. `threads`: their number; None: chosen from the tensor's size."""
    t = _call.new_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes)
    threads = pool.choose_threads(threads, v.nbytes)
    ranges = pool.ranges(-(-v.nbytes // _CHUNK), threads) if v.nbytes else []
    sums = ffi.new("uint64_t[]", len(ranges) + 1)

    def part(i: int, _: int) -> int:
        return lib.codec_digest(t, *ranges[i], sums + i)

    for status in pool.run(part, len(ranges), threads):
        check(status)
    return sum(sums) % (1 << 64)


def views_of(frames: Any) -> list[TensorView]:
    """Return the views of a sequence of frames; raise ArgumentError for a single frame or another type."""
    one = getattr(frames, "ndim", 2) < 2 or type(frames) in (str, bytes, bytearray) or hasattr(frames, "keys")
    if one or not hasattr(frames, "__iter__"):
        raise ArgumentError(f"frames must be a sequence of frames, not {kind_of(frames)}")
    views = [view_bytes(frame) for frame in frames]
    check_iterated("frames", frames, views)
    return views
