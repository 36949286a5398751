"""Frames that nobody waits for."""

import sys
from typing import Any

from codec.engines.cuda.encoding import ALIGNMENT, Encoding
from codec.engines.cuda.job import COUNTS_NBYTES, WRITTEN_NBYTES, begin, bound_of
from codec.engines.cuda.workspace import Work
from codec.engines.request import EncodeRequest
from codec.errors import ArgumentError, EngineError
from codec.optimizers.custom import Custom
from codec.tensors.view import is_torch


class Pending:
    """A frame that a GPU makes in the order of its stream: see :func:`codec.encode_async`.

    What the GPU needs for it is kept as long as this object.

    Attributes
    ----------
    nbytes : array or tensor of one int64, on the device
        Size of the frame in bytes; 0 as long as there is none, and if the tensor cannot be encoded.
    status : array or tensor of one int32, on the device
        Once the frame should be there a :class:`codec.Status`.
    counts : array or tensor of 256 int32, on the device
        Of :class:`codec.Lossless` floats and :class:`codec.Truncate`: how often each symbol of the exponent occurs in
        the sample, for :meth:`codec.Codebook.from_counts` of a later step.
    """

    def __init__(self, work: Work, r: EncodeRequest) -> None:
        _check(r)
        written, v = work.device.empty("uint8", (WRITTEN_NBYTES + COUNTS_NBYTES,), r.x.owner)
        self._encoding = Encoding(work, r, v.address)
        begin(work, [self._encoding.job])
        work.device.copy(v.address + WRITTEN_NBYTES, self._encoding.job.counts, COUNTS_NBYTES)
        self.nbytes = _seen(written[24:32], "int64")
        self.counts = _seen(written[WRITTEN_NBYTES:], "int32")
        self.status = _seen(written[40:44], "int32")

    def wait(self) -> Any:
        """Wait for the stream.

        Returns
        -------
        array or tensor of uint8
            The part of `out` that the frame takes.

        Raises
        ------
        CodecError
            The tensor cannot be encoded, as :func:`codec.encode` says.
        """
        with self._encoding.work.resume():
            return self._encoding.finish()


def _check(r: EncodeRequest) -> None:
    """Raise what stands in the way of never waiting."""
    for name, v in r.views:
        if v.device == "cpu":
            raise EngineError(f"{name} lies in host memory, for which encode_async would have to wait")
    if r.out is None or r.out.address % ALIGNMENT:
        raise ArgumentError(f"encode_async needs out=, at a multiple of {ALIGNMENT} bytes")
    if r.residual is not None and r.out.nbytes < bound_of(r):
        raise ArgumentError("encode_async with residual= needs an out= of bound() bytes: one that surely is enough")
    if r.levels is not None and any(isinstance(o, Custom) for _, o in r.levels.groups):
        raise ArgumentError("optimizers.Custom is computed on the host, for which encode_async would have to wait")


def _seen(memory: Any, dtype: str) -> Any:
    """Bytes on a device as values."""
    return memory.view(getattr(sys.modules["torch"], dtype) if is_torch(memory) else dtype)
