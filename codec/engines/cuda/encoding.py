"""Tensors to frames: three kernels, one after the other, that nothing waits for."""

import struct
from typing import Any

from codec.core import check
from codec.engines.cuda.job import Job, plan_of
from codec.engines.cuda.work import Work, number, pointer
from codec.engines.native.encoding import frame_in
from codec.engines.request import EncodeRequest
from codec.errors import SpecError, Status
from codec.view import TensorView

ALIGNMENT = 8  # of a frame's sections
_WRITTEN = struct.Struct("<4Q4I")  # codec_written of native/cuda/written.cuh
_SHORT_OUTPUT = int(Status.SHORT_OUTPUT)


class Encoding:
    """A frame on its way. All that it takes is in `work`'s memory, and nothing was waited for.

    Attributes
    ----------
    frame : int
        Address of the frame.
    counts : int
        As of a :class:`Job`.

    Parameters
    ----------
    work : Work
    r : EncodeRequest
    written : int, optional
        Address of memory for a codec_written of ``native/cuda/written.cuh``: size and status will be there.
    """

    def __init__(self, work: Work, r: EncodeRequest, written: int = 0) -> None:
        r.check_apart()
        self.work, self.request = work, r
        plan = plan_of(r)
        short = r.out is not None and r.out.nbytes < plan.bound
        self._new: TensorView | None = None
        if r.out is None and r.x.device != "cpu":
            self._new = work.device.empty("uint8", (plan.bound,), r.x.owner)[1]
            self.frame, self._capacity = self._new.address, plan.bound
        elif r.out is None or r.out.device == "cpu" or r.out.address % ALIGNMENT or (short and r.residual is not None):
            self.frame, self._capacity = work.new(plan.bound), plan.bound
        else:
            self.frame, self._capacity = r.out.address, r.out.nbytes
        residual = work.write(r.residual, read=r.feedback, apart=short) if r.residual is not None else 0
        job = Job(work, r, plan, residual, written)
        self._written, self.counts = job.written, job.counts
        job.choose(self._capacity)
        place, shared = (pointer(self.frame), number(self._capacity)), pointer(job.written)
        if plan.view.nblocks:
            rest = [*job.scratch, job.places, shared, *job.cuts]
            work.device.launch(job.kernel, job.grid, job.view, job.job, job.x, *place, *rest)
        work.device.launch(
            "close_frame", job.teams, job.view, job.job, job.source, *place, job.choice, job.head, shared
        )
        if residual and job.family == "lossless":  # whose kernels need not know that nothing is left
            work.device.clear(residual, 4 * plan.view.n)

    def finish(self) -> Any:
        """Wait, and return the frame.

        Raises
        ------
        CodecError
            The tensor cannot be encoded.
        """
        said = _WRITTEN.unpack(self.work.device.download(self._written, _WRITTEN.size))
        nbytes, fault, out = said[3], said[6], self.request.out
        if fault == _SHORT_OUTPUT or (out is not None and nbytes > out.nbytes):
            raise SpecError(
                f"out= has {self._capacity if out is None else out.nbytes} bytes, which is too few; "
                "bound() says how many are enough",
                _SHORT_OUTPUT,
            )
        check(fault)
        self.work.finish()
        if out is not None:
            self.work.deliver(out, self.frame, nbytes)
            return frame_in(out, nbytes) if out.device == "cpu" else self.work.device.bytes_of(out, nbytes)
        if self._new is not None:
            return self.work.device.bytes_of(self._new, nbytes)
        return bytes(self.work.device.download(self.frame, nbytes))
