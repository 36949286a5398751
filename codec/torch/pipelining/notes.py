"""Reports that ranks exchange at the end of a training step: success, or the first error."""

import json
from typing import Any, NamedTuple, cast

from codec import CodecError, FrameError, PeerError, StateError, Status
from codec.stateful.activation.values import ids_of
from codec.torch.auto.edges import checked
from codec.torch.pipelining.end import Aborted, Ids

Samples = dict[int, list[int]]  # sample ids by edge
_CODES = frozenset(Status)


class Report(NamedTuple):
    """Report of one rank on an attempt."""

    failed: bool
    last: bool  # True: the rank makes no further attempt if this one fails
    error: str  # message of the error; "" if the rank has only received ABORTED from a neighbour
    repeatable: bool  # the step may succeed if it is repeated
    code: int | None  # code of the error; None if this version of the library does not know it
    unknown: Samples  # samples whose m (stored activations) is missing or differs, by edge
    samples: Ids  # samples of the step that the rank knows; empty if it does not report them
    auto: dict[str, Any] | None = None  # measurements from which "auto" chooses specs


class Notes:
    """Errors and sample ids of the stages of one rank during an attempt."""

    def __init__(self) -> None:
        self.ids: dict[int, Ids] = {}  # samples by micro-batch of the current run
        self._earlier_ids: list[Ids] = []  # samples of earlier runs
        self.error: CodecError | None = None  # first error, or the first that repeating the step cannot fix
        self.failed = False
        self._repeatable = True
        self._unknown: Samples = {}

    def begin_run(self) -> None:
        """Begin a run of the schedule; an attempt may have several runs."""
        self._earlier_ids.extend(self.ids.values())
        self.ids = {}

    def add(self, error: CodecError | Aborted, edge: int) -> None:
        """Record an error on an edge."""
        self.failed = True
        if isinstance(error, Aborted):
            return
        repeatable = isinstance(error, FrameError | StateError)
        if self.error is None or (self._repeatable and not repeatable):
            self.error = error
        self._repeatable &= repeatable
        unknown: Any = error.item if isinstance(error, StateError) else None
        if isinstance(unknown, tuple):
            self._unknown.setdefault(edge, []).extend(cast(tuple[Any, ...], unknown))

    def report(self, *, last: bool, samples: bool, auto: dict[str, Any] | None = None) -> bytes:
        """Return the report of this rank as bytes.

        Parameters
        ----------
        last : bool
            True: the rank makes no further attempt if this one fails.
        samples : bool
            True: report the samples of the step. After an error, later stages may not know them.
        auto : dict, optional
            Measurements from which "auto" chooses specs.
        """
        ids = [*self._earlier_ids, *self.ids.values()] if samples else []
        e = self.error
        report = {
            "failed": self.failed,
            "last": last,
            "error": "" if e is None else str(e)[:2000],
            "repeatable": self._repeatable,
            "code": None if e is None or e.code is None else int(e.code),
            "unknown": sorted(self._unknown.items()),
            "samples": sorted({i for chunk in ids for i in chunk}),
            **({} if auto is None else {"auto": auto}),
        }
        return json.dumps(report).encode()


def report_of(data: bytes, rank: int) -> Report:
    """Parse the report that a rank has sent.

    Raises
    ------
    PeerError
        The bytes are not a report.
    """
    try:
        d: dict[str, Any] = json.loads(data)
        code = None if d["code"] is None else int(d["code"])
        unknown = {int(edge): ids_of(ids) for edge, ids in d["unknown"]}
        samples = ids_of(d["samples"])
        return Report(
            bool(d["failed"]),
            bool(d["last"]),
            str(d["error"]),
            bool(d["repeatable"]),
            code if code in _CODES else None,
            unknown,
            samples,
            checked(d["auto"]) if "auto" in d else None,
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
        raise PeerError(f"the report of the step that rank {rank} has sent is not valid: {e}") from e
