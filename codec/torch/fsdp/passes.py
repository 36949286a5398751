"""Errors and residuals of the collectives in an FSDP2 backward pass, which succeeds or fails as a whole."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from codec import CodecError, PeerError
from codec.torch._compat import BackwardEnd, backward_pass, call_after_backward
from codec.torch.feedback.pair import ResidualPair
from codec.torch.group.communicator import close_communicator
from codec.torch.group.levels import group_of

_passes: "weakref.WeakValueDictionary[int, Pass]" = weakref.WeakValueDictionary()  # in progress, by graph task id


class Pass:
    """State of the collectives in one backward pass: their first error, and the residuals that they write.

    FSDP2 cannot recover from an exception inside a backward pass. So the first error of a collective is stored, and is
    raised after FSDP2 has finished the pass. Later collectives of the pass fail, too, so that an error within one
    replica also reaches the other replicas. Residuals change only if the pass ends without an error.
    """

    def __init__(self) -> None:
        self._error: CodecError | None = None
        self._changed: dict[ResidualPair, ResidualPair] = {}  # copy of each pair of residuals, which the pass changes
        self._groups: list[Any] = []  # groups of the pass's collectives
        self._ended = False  # True: this rank's program knows the outcome, or is about to receive the pass's error

    @staticmethod
    def current() -> "Pass":
        """Return the Pass of the current backward pass, whose end calls :meth:`end`; outside of one, a new Pass.

        If an exception ends the backward pass, autograd deletes the callback, which calls :meth:`abandon`, and this
        object with the copies of residuals.
        """
        task = backward_pass()
        if task is None:
            return Pass()
        current = _passes.get(task)
        if current is None:
            current = _passes[task] = Pass()
            call_after_backward(BackwardEnd(current.end, current.abandon))
        return current

    def changed(self, residuals: ResidualPair) -> ResidualPair:
        """Return this pass's copy of a collective's residuals, whose changes :meth:`end` commits."""
        if residuals not in self._changed:
            self._changed[residuals] = residuals.forked()
        return self._changed[residuals]

    def check(self) -> None:
        """Raise PeerError if an earlier collective of this pass has failed, so that the ranks of all groups fail."""
        if self._error is not None:
            raise PeerError(f"an earlier collective of this backward pass has failed: {self._error}") from self._error

    def run(self, collective: Callable[[], Any], output: torch.Tensor, group: Any) -> None:
        """Run a collective of this pass. If it fails in a backward pass, store the error and fill `output` with NaN.

        Other exceptions close the connections of all groups, since other ranks may have the result.
        """
        self._groups.append(group)
        try:
            try:
                collective()
            except CodecError as e:
                if backward_pass() is None:
                    self._ended = True
                    raise
                self._error = self._error or e
                with torch.no_grad():
                    output.fill_(torch.nan)
            if backward_pass() is None:
                self.end()
        except BaseException:
            self.abandon()
            raise

    def end(self) -> None:
        """Raise the first error of the pass; if there is none, commit the changed residuals."""
        if self._error is not None:
            self._ended, self._changed = True, {}
            raise self._error
        for residuals, changed in self._changed.items():
            residuals.adopt(changed)
        self._changed = {}

    def abandon(self) -> None:
        """Close the connections of all groups, unless the pass has failed on all ranks: this rank has not ended it.

        The other ranks may have all results. If this rank took another step with them, shards would differ for ever.
        """
        if not self._ended:
            for group in self._groups:
                close_communicator(group_of(group), cancel=True)
