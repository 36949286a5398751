"""Errors and residuals of the collectives in an FSDP2 backward pass, which succeeds or fails as a whole."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from codec import CodecError, PeerError
from codec.torch._compat import backward_pass, call_after_backward
from codec.torch.feedback.single import Residuals
from codec.torch.reduction.host import Reduction, Values

_passes: "weakref.WeakValueDictionary[int, Pass]" = weakref.WeakValueDictionary()  # in progress, by graph task id


class Pass:
    """State of the collectives in one backward pass: their first error, and the residuals that they write.

    FSDP2 cannot recover from an exception inside a backward pass. So the first error of a collective is stored, and is
    raised after FSDP2 has finished the pass. Later collectives of the pass fail, too, so that an error within one
    replica also reaches the other replicas. Residuals change only if the pass ends without an error.
    """

    def __init__(self) -> None:
        self._error: CodecError | None = None
        self._copies: dict[Residuals, dict[str, Values]] = {}

    @staticmethod
    def current() -> "Pass":
        """Return the Pass of the current backward pass, whose end calls :meth:`end`; outside of one, a new Pass.

        If an exception ends the backward pass, autograd deletes this object, and with it the copies of residuals.
        """
        task = backward_pass()
        if task is None:
            return Pass()
        current = _passes.get(task)
        if current is None:
            current = _passes[task] = Pass()
            call_after_backward(current.end)
        return current

    def begin(self, residuals: Residuals, key: str, r: Reduction) -> Values:
        """Return this pass's copy of a module's residual, which the reduction of the module's gradients updates."""
        copies = self._copies.setdefault(residuals, {})
        if key not in copies:
            copies[key] = residuals.copy(key, r.n, r.memory)
        return copies[key]

    def check(self) -> None:
        """Raise PeerError if an earlier collective of this pass has failed, so that the ranks of all groups fail."""
        if self._error is not None:
            raise PeerError(f"an earlier collective of this backward pass has failed: {self._error}") from self._error

    def run(self, collective: Callable[[], Any], output: torch.Tensor) -> None:
        """Run a collective of this pass. If it fails in a backward pass, store the error and fill `output` with NaN."""
        try:
            collective()
        except CodecError as e:
            if backward_pass() is None:
                raise
            self._error = self._error or e
            with torch.no_grad():
                output.fill_(torch.nan)
            return
        if backward_pass() is None:
            self.end()

    def end(self) -> None:
        """Raise the first error of the pass; if there is none, replace the residuals by the updated copies."""
        error, self._error = self._error, None
        copies, self._copies = self._copies, {}
        if error is not None:
            raise error
        for residuals, written in copies.items():
            residuals.replace(written)
