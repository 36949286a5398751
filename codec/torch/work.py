"""Collectives in the background, as torch.distributed itself gives them to those who begin one."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from codec.torch.worker import Pending


class Handle(dist.Work):
    """A pending collective, for callers who know torch's own only.

    Parameters
    ----------
    pending : Pending
        The collective.
    outputs : sequence of torch.Tensor
        What it writes to.
    """

    def __init__(self, pending: Pending, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._pending, self._outputs = pending, list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; then True. Its error is raised."""
        self._pending.wait(timeout.total_seconds() if timeout else None)
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._pending.is_completed()

    def is_success(self) -> bool:
        """Whether it is over, and no error came of it."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Its error, once it is over; or None."""
        if not self.is_completed():
            return None
        try:
            self._pending.wait()
        except Exception as e:
            return e
        return None

    def result(self) -> list[torch.Tensor]:
        """What it has written to."""
        return self._outputs

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """The tensors, as a future. Its error is one for C++, too, which would take one set from Python for a value."""
        over: torch.futures.Future[None] = torch.futures.Future()

        def outputs(_: Any) -> list[torch.Tensor]:
            self._pending.wait()
            return self._outputs

        future = over.then(outputs)
        self._pending.when_over(lambda: over.set_result(None))
        return future
