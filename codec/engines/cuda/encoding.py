"""Encoding of a tensor on a device: three or four kernels in stream order, without synchronization."""

from typing import Any

from codec._c.library import check, ffi
from codec.engines.cuda.job import WRITTEN_NBYTES, EncodeJob
from codec.engines.cuda.plan import plan_of
from codec.engines.cuda.workspace import CallMemory
from codec.engines.native.encoding import frame_in
from codec.engines.request import EncodeRequest
from codec.errors import ArgumentError, Status

ALIGNMENT = 8  # alignment of a frame's sections in bytes
_FULL = 7 / 8  # a frame that fills less than this fraction of its buffer is copied to a smaller one
_SHORT_OUTPUT = int(Status.SHORT_OUTPUT)


class FrameEncoding:
    """Encoding of one frame, whose memory is allocated and whose kernels can be launched.

    Parameters
    ----------
    work : CallMemory
        Device memory of the call.
    r : EncodeRequest
        Arguments of the call.

    Attributes
    ----------
    frame : int
        Device address of the frame.
    copied : bool
        True if :meth:`finish` has returned a copy of the frame, which may still be in flight on the stream.
    """

    def __init__(self, work: CallMemory, r: EncodeRequest) -> None:
        r.check_apart()
        self.work, self.request = work, r
        plan = plan_of(r)
        short = r.out is not None and r.out.nbytes < plan.bound
        self._new: Any = None  # new array for the frame on the device; None if the caller's `out` is used
        self.copied = False
        if r.out is None and r.x.device != "cpu":
            self._new, self.frame = work.device.new_bytes(plan.bound, r.x.owner)
            self._capacity = plan.bound
        elif r.out is None or r.out.device == "cpu" or r.out.address % ALIGNMENT or (short and r.residual is not None):
            self.frame, self._capacity = work.new(plan.bound), plan.bound
        else:
            self.frame, self._capacity = r.out.address, r.out.nbytes
        residual = work.write(r.residual, read=r.feedback, apart=short) if r.residual is not None else 0
        self.job = EncodeJob(work, r, plan, self.frame, self._capacity, residual)

    def finish(self, written: bytes | None = None) -> Any:
        """Wait for the stream, and return the frame.

        Parameters
        ----------
        written : bytes, optional
            Copy of the frame's codec_written, if the caller has downloaded it.

        Raises
        ------
        CodecError
            The tensor cannot be encoded.
        """
        data = written or self.work.device.download(self.job.written, WRITTEN_NBYTES)
        fields = ffi.from_buffer("struct written *", data)
        nbytes, fault, out = fields.nbytes, fields.fault, self.request.out
        if fault == _SHORT_OUTPUT or (out is not None and nbytes > out.nbytes):
            raise ArgumentError(
                f"out= has {self._capacity if out is None else out.nbytes} bytes, too few for this frame: allocate as "
                "many as bound() returns",
                _SHORT_OUTPUT,
            )
        check(fault)
        self.work.finish()
        if out is not None:
            self.work.deliver(out, self.frame, nbytes)
            return frame_in(out, nbytes) if out.device == "cpu" else self.work.device.bytes_of(out, nbytes)
        if self._new is not None:
            return self._fitted(nbytes)
        return bytes(self.work.device.download(self.frame, nbytes))

    def _fitted(self, nbytes: int) -> Any:
        """Return the frame, or a copy of it if the buffer, which has the size of the upper bound, is much larger."""
        device = self.work.device
        if nbytes >= _FULL * self._capacity:
            return self._new[:nbytes]
        frame, address = device.new_bytes(nbytes, self.request.x.owner)
        device.copy(address, self.frame, nbytes)
        self.copied = True
        return frame
