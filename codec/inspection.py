"""What a frame's header says."""

from dataclasses import dataclass
from typing import Any

from codec import _call
from codec._c.library import DTYPE_NAMES, check, ffi, lib
from codec._c.spec_structs import spec_of
from codec.specs import Spec
from codec.tensors.view import TensorView, fetch, view_bytes

_HEAD = 1 << 16  # bytes of a frame on a device that are looked at: more than all but large side sections take


@dataclass(frozen=True, slots=True)
class Info:
    """What a frame's header says.

    Attributes
    ----------
    spec : Spec
        Spec that was encoded with, as far as decoding depends on it. A group size that the shape chose is the number
        in use. A frame does not hold the seed of random bits, nor a ``scale`` or ``clip`` that was given: these are 0
        or None here. A ``guard`` is a number, greater by as many bits as the dtype of the state's ``theta`` has more
        of mantissa than the tensor's. Where segments have records, ``group_size`` is known only if the side section is
        there too, and of a tensor without values never: it is the default then.
    dtype : str
        Name of the dtype, such as ``"bfloat16"``.
    shape : tuple of int
        Shape of the tensor.
    nbytes, tensor_nbytes : int
        Bytes of the frame and of the tensor.
    sections : dict of str to (int, int)
        Offset and size in bytes of header, side (codebooks and scale model), directory, planes (raw in every block)
        and regions. A stored frame has its values in ``regions``.
    version : int
        Of the format.
    n : int
        Number of values.
    stored : bool
        The values follow the header as they are.
    block, nblocks : int
        Values a block (0 where blocks follow rows) and number of blocks; 0 if stored.
    checksum : int
        64 bits.
    codebook_id : int or None
        Id of the codebook that decoding needs.
    nsegments : int
        Segments that have records in the frame, 0 if there are none.
    clipped : bool
        Magnitudes were limited by :class:`codec.Ternary`'s ``clip``; by which, the frame does not say.
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

    @property
    def ratio(self) -> float:
        """Bytes of the frame over bytes of the tensor."""
        return self.nbytes / max(1, self.tensor_nbytes)


def read_header(v: TensorView) -> Any:
    """A codec_info of what begins with a header, in host memory."""
    info = _call.new_info()
    check(lib.codec_inspect(v.data, v.nbytes, info), info.fault)
    return info


def verify(frame: Any) -> None:
    """Check all of a frame but the values: header, sections, directory and every checksum.

    Parameters
    ----------
    frame : bytes or buffer
        A frame, whole.

    Raises
    ------
    FrameError
        It is not what was written.
    """
    check_frame(fetch("a frame", view_bytes(frame)))


def check_frame(v: TensorView) -> None:
    """Raise FrameError for bytes in host memory that are not a frame, as far as it shows without decoding."""
    if lib.codec_verify(v.data, v.nbytes):
        # once more, by a call that says where it was; no frame goes with a tensor of no dtype
        call = _call.take()
        status = lib.codec_decode(v.data, v.nbytes, _call.new_tensor(0, ()), call.context, ffi.NULL, 0)
        check(status, call.fault)


def inspect(frame: Any) -> Info:
    """Read a frame's header.

    Parameters
    ----------
    frame : bytes or buffer
        A frame, or its beginning: the header (at most 112 bytes) is enough, but ``codebook_id`` and ``nsegments`` are
        known only if the side section is there too.

    Raises
    ------
    FrameError
        The bytes are not the beginning of a frame; or too few of one, then ``code`` is ``Status.TRUNCATED`` and
        ``expected`` how many it takes to go on.

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
    )
