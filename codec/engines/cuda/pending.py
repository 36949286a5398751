"""Result of :func:`codec.encode_async`: a frame that a GPU encodes asynchronously."""

import sys
from typing import Any

from codec.engines.cuda.encoding import ALIGNMENT, FrameEncoding
from codec.engines.cuda.job import COUNTS_NBYTES, WRITTEN_NBYTES, begin
from codec.engines.cuda.plan import plan_of
from codec.engines.cuda.workspace import CallMemory
from codec.engines.request import EncodeRequest
from codec.errors import ArgumentError, EngineError
from codec.optimizers.custom import Custom
from codec.tensors.view import is_torch


class PendingFrame:
    """Frame that a GPU encodes in stream order: see :func:`codec.encode_async`.

    This object owns the device memory that the kernels use, so keep it alive until they have finished.
    """

    def __init__(self, work: CallMemory, r: EncodeRequest) -> None:
        _check(r)
        self._encoding = FrameEncoding(work, r)
        job, device = self._encoding.job, work.device
        nbytes = WRITTEN_NBYTES + job.layout.zeros_nbytes
        self._results, at = device.new_bytes(nbytes, r.x.owner)
        device.clear(at, nbytes)
        job.written, job.counts = at, at + WRITTEN_NBYTES
        begin(work, [job])

    @property
    def nbytes(self) -> Any:
        """Size of the frame in bytes, as one int64 on the device; 0 while it is incomplete, or if encoding fails."""
        return _view_as(self._results[24:32], "int64")

    @property
    def status(self) -> Any:
        """:class:`codec.Status` of the encoding, as one int32 on the device, valid once the kernels have finished."""
        return _view_as(self._results[40:44], "int32")

    @property
    def counts(self) -> Any:
        """Counts of the exponents' symbols in the sample, as 256 int32 on the device.

        The counts are valid for :class:`codec.Truncate`, and for floats with :class:`codec.Lossless`. Pass them to
        :meth:`codec.Codebook.from_counts` to build a codebook for later steps.
        """
        return _view_as(self._results[WRITTEN_NBYTES : WRITTEN_NBYTES + COUNTS_NBYTES], "int32")

    def wait(self) -> Any:
        """Wait for the stream, and return the frame.

        Returns
        -------
        array or tensor of uint8
            The bytes of `out` that contain the frame.

        Raises
        ------
        CodecError
            The tensor cannot be encoded, as :func:`codec.encode` reports.
        """
        with self._encoding.work.resume():
            return self._encoding.finish()


def _check(r: EncodeRequest) -> None:
    """Raise an error for arguments with which the host would have to wait for the GPU or to compute."""
    for name, v in r.views:
        if v.device == "cpu":
            raise EngineError(f"{name} is in host memory, but encode_async takes only tensors on a GPU: use encode()")
    if r.out is None or r.out.address % ALIGNMENT:
        raise ArgumentError(
            f"encode_async needs out=, a buffer on the GPU at an address that is a multiple of {ALIGNMENT}"
        )
    if r.residual is not None and r.out.nbytes < (bound := plan_of(r).bound):
        raise ArgumentError(
            f"encode_async with residual= needs out= of at least {bound} bytes (see bound()), got {r.out.nbytes}"
        )
    if r.levels is not None and any(isinstance(o, Custom) for _, o in r.levels.groups):
        raise ArgumentError("encode_async cannot use optimizers.Custom, which runs on the host: use encode()")


def _view_as(memory: Any, dtype: str) -> Any:
    """Return bytes on a device as an array of ``dtype``."""
    return memory.view(getattr(sys.modules["torch"], dtype) if is_torch(memory) else dtype)
