"""Requests: the checked arguments of one call, which are the only input of an engine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from codec._call import CodeLengths
from codec.errors import LimitError, Status
from codec.optimizers.arguments import LevelSource
from codec.specs import BoundSpec, Spec
from codec.tensors.overlap import check_apart
from codec.tensors.view import TensorView

# Default upper bound of a new tensor's size: the larger of _ALWAYS bytes and _TIMES times the size of its frame.
_ALWAYS, _TIMES = 1 << 30, 256
_new: Any = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class EncodeRequest(NamedTuple):
    """Arguments of a call that encodes a tensor."""

    x: TensorView
    spec: Spec
    out: TensorView | None = None  # uint8, destination of the frame
    residual: TensorView | None = None  # float32, with as many values as x; destination of the residual
    codebook: CodeLengths | None = None
    segments: bytes | None = None  # array of the C library's codec_segment
    stream: int = 0
    levels: LevelSource | None = None
    threads: int | None = None
    feedback: bool = False  # encode x + residual
    verify_first: bool = True  # validate all of x before `residual` is written
    delta: bool = False  # native only: encode x - residual, and add the decoded values to residual
    base: TensorView | None = None  # Delta: tensor of x's dtype and shape

    @property
    def views(self) -> list[tuple[str, TensorView]]:
        """Return views of all tensors that are read or written, each with the name of its argument."""
        views = [("x", self.x)]
        if self.out is not None:
            views.append(("out=", self.out))
        if self.residual is not None:
            views.append(("residual=", self.residual))
        if self.base is not None:
            views.append(("base=", self.base))
        return views + self.levels.read if self.levels else views

    def check_apart(self) -> None:
        """Raise ArgumentError if `out` or `residual` overlaps with an input or with each other."""
        state = [(name, v, False) for name, v in self.levels.read] if self.levels else []
        if self.base is not None:
            state.append(("base=", self.base, False))
        if self.residual is not None:
            check_apart("residual=", self.residual, [("x", self.x, not (self.feedback or self.delta)), *state])
        if self.out is not None:
            residual = [("residual=", self.residual, False)] if self.residual is not None else []
            check_apart("out=", self.out, [("x", self.x, False), *residual, *state])


def new_encode_request(
    x: TensorView,
    spec: Spec,
    out: TensorView | None,
    residual: TensorView | None,
    codebook: CodeLengths | None,
    segments: bytes | None,
    stream: int,
    levels: LevelSource | None,
    threads: int | None,
    feedback: bool,
    verify_first: bool,
    base: TensorView | None,
) -> EncodeRequest:
    """Return the request of an encoding call, in a third of the time of ``EncodeRequest(...)`` with these names."""
    request = x, spec, out, residual, codebook, segments, stream, levels, threads, feedback, verify_first, False, base
    return _new(EncodeRequest, request)


class DecodeRequest(NamedTuple):
    """Arguments of a call that decodes a frame, adds it to a tensor, or reduces several frames."""

    frames: Sequence[TensorView]
    out: Any = None  # the caller's object, not a view, because the view depends on the frame's dtype
    like: Any = None
    codebooks: Sequence[CodeLengths] = ()
    max_nbytes: int | None = None
    threads: int | None = None
    bound: BoundSpec | None = None
    verify_first: bool = True  # validate all of the frame before `out` is written
    head: TensorView | None = None  # host copy of the first bytes of a frame on a device
    nontemporal: bool = False  # write with non-temporal stores
    check_finite: bool = False  # reject NaN and Inf in the result of a reduction
    check_only: bool = False  # validate, and write nothing
    base: Any = None  # Delta: the caller's object, not a view, as for `out`
    # CUDA, deferred calls: host memory that will contain the received head when the verdict is evaluated. `head` is
    # then the expected head, which may differ from the received one only in the checksum.
    arriving: TensorView | None = None
    in_flight: bool = False  # CUDA, deferred calls: the frame may still be in flight; the host reads only `head`

    def limit(self) -> int:
        """Return the maximum size of a new tensor in bytes."""
        if self.max_nbytes is not None:
            return self.max_nbytes
        return max(_ALWAYS, _TIMES * max(frame.nbytes for frame in self.frames))

    def allows(self, nbytes: int) -> bool:
        """Return True if the result may have `nbytes` bytes; always True if the request has `out`."""
        return (self.max_nbytes is None and nbytes <= _ALWAYS) or self.out is not None or nbytes <= self.limit()

    def check_limit(self, nbytes: int) -> None:
        """Raise LimitError if a result of `nbytes` bytes is larger than allowed."""
        if not self.allows(nbytes):
            raise LimitError(
                f"the tensor has {nbytes} bytes, more than max_nbytes, {self.limit()}: pass max_nbytes= or out=",
                Status.LIMIT,
            )

    def check_apart(
        self, out: TensorView, levels: LevelSource | None, in_place: bool, base: TensorView | None = None
    ) -> None:
        """Raise ArgumentError if `out` shares memory with an input.

        `in_place`: True if `out` may be the same array as one of the optimizer's state, or as the base.
        """
        others = [("a frame", frame, False) for frame in self.frames]
        if base is not None:
            others.append(("base=", base, in_place))
        if levels is not None:
            others += [(name, v, in_place) for name, v in levels.read]
        check_apart("out=", out, others)


def new_decode_request(
    frames: Sequence[TensorView],
    out: Any,
    like: Any,
    codebooks: Sequence[CodeLengths],
    max_nbytes: int | None,
    threads: int | None,
    bound: BoundSpec | None,
    verify_first: bool,
    nontemporal: bool,
    base: Any,
) -> DecodeRequest:
    """Return the request of a decoding call, in a third of the time of ``DecodeRequest(...)`` with these names."""
    request = (frames, out, like, codebooks, max_nbytes, threads, bound, verify_first)
    request += None, nontemporal, False, False, base, None, False
    return _new(DecodeRequest, request)
