"""Messages between GPUs, by NCCL connections of their own (docs/protocol.md, section 18)."""

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from codec import PeerError

_POLL_SECONDS = 20e-6  # between two looks at a message in flight
_NEVER = timedelta(days=3653)


class DeviceExchange:
    """NCCL connections of the ranks of a group.

    They are not those of the group itself, which the caller may use in another thread: NCCL needs the same order of
    collectives on all ranks.

    Parameters
    ----------
    pg : Backend
        Connections.
    size : int
        Number of ranks.
    timeout : timedelta
        Longest time that a message may take.
    """

    def __init__(self, pg: Any, size: int, timeout: timedelta) -> None:
        self._pg, self._size, self._timeout = pg, size, timeout
        self.close = weakref.finalize(self, _abort, pg)  # closes the connections, also while messages are in flight

    def all_to_all(self, rows: torch.Tensor, cancelled: Callable[[], bool]) -> torch.Tensor:
        """Send row i to rank i; return the rows that the ranks have sent to this one, by rank.

        Parameters
        ----------
        rows : tensor of uint8
            A row for each rank.
        cancelled : callable
            Returns True if the caller does not wait any more.

        Raises
        ------
        PeerError
            A rank is lost or does not answer in time, or the caller does not wait.
        """
        received = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._run(lambda: self._pg.alltoall_base(received, rows, [], []), cancelled)
        return received

    def all_gather(self, row: torch.Tensor, cancelled: Callable[[], bool]) -> torch.Tensor:
        """Return the rows of all ranks, by rank, from this rank's row; `cancelled` and errors as for all_to_all."""
        received = torch.empty((self._size, *row.shape), dtype=row.dtype, device=row.device)
        self._run(lambda: self._pg._allgather_base(received.view(-1), row.view(-1)), cancelled)
        return received

    def _run(self, begin: Callable[[], Any], cancelled: Callable[[], bool]) -> None:
        """Begin a collective, and wait for it on the host: a stream that waits for a lost rank would never go on."""
        end = time.monotonic() + self._timeout.total_seconds()
        try:
            work = begin()
            while not work.is_completed():
                if cancelled():
                    raise PeerError("the collective was cancelled: make a new group")
                if time.monotonic() > end:
                    raise PeerError(f"frames from other GPUs did not arrive within {self._timeout}")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except PeerError:
            raise
        except RuntimeError as e:
            raise PeerError(f"a rank is gone or does not answer: {e}") from e


def _abort(pg: Any) -> None:
    with suppress(RuntimeError):
        pg.abort()


def uses_nccl(group: Any) -> bool:
    """Return True if NCCL carries a group's tensors on GPUs."""
    cuda = torch.device("cuda")
    return cuda in group._device_types and group._get_backend(cuda).name() == "nccl"


def connect_nccl(group: Any) -> Any:
    """Return new NCCL connections of a group's ranks, without a timeout: NCCL's own ends the process."""
    store = PrefixStore("codec/nccl", group.get_group_store().clone())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
