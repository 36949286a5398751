"""Ranks as forked processes, each in a network namespace if wanted.

A forked rank starts within milliseconds, since its parent has imported all modules. The parent must not have started
threads, so it sets the number of threads of OpenMP and of codec to one, and trains no model itself.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import netns

_CLONE_NEWNET = 0x40000000
LOOPBACK = "127.0.0.1"

Emit = Callable[[dict[str, Any]], None]


def enter(namespace: str) -> None:
    """Move this process, which must have a single thread, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (Path("/run/netns") / namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {namespace}")


def free_port() -> int:
    """Return a port of the loopback interface on which nobody listens."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return server.getsockname()[1]


def run(
    ranks: int,
    work: Callable[[int, Any, Emit], None],
    *,
    network: netns.Network | None = None,
    each: int = 1,
    timeout: float = 600,
) -> list[list[dict[str, Any]]]:
    """Run work(rank, store, emit) in one process for each rank, and return the rows that each has emitted.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    work : callable
        Function of the rank, of the store, whose host is rank 0, and of a function that sends a row to the parent.
    network : Network, optional
        Namespaces of the ranks; by default, all ranks use the loopback interface.
    each : int
        Number of consecutive ranks in each namespace.
    timeout : float
        Seconds until all ranks must have ended.

    Raises
    ------
    NetworkError
        A rank has failed, or the timeout has expired. All ranks have ended.
    """
    port = free_port() if network is None else netns.PORT
    deadline = time.monotonic() + timeout
    pids: dict[int, int] = {}  # pid by the parent's end of the pipe
    buffers: list[bytes] = [b"" for _ in range(ranks)]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with selectors.DefaultSelector() as selector:
            for rank in range(ranks):
                ours, theirs = os.pipe()
                pid = os.fork()
                if not pid:
                    for inherited in (*pids, ours):
                        os.close(inherited)
                    namespace = None if network is None else (network.names[rank // each], network.environment(0))
                    _child(rank, ranks, port, work, namespace, theirs)
                os.close(theirs)
                pids[ours] = pid
                selector.register(ours, selectors.EVENT_READ, rank)
            while selector.get_map():
                if time.monotonic() > deadline:
                    raise netns.NetworkError(f"the {ranks} ranks took longer than {timeout:g} s and were ended")
                for key, _ in selector.select(0.5):
                    data = os.read(key.fd, 1 << 16)
                    buffers[key.data] += data
                    if not data:
                        selector.unregister(key.fd)
                        status = os.waitstatus_to_exitcode(os.waitpid(pids[key.fd], 0)[1])
                        pids[key.fd] = 0
                        if status:
                            said = json.loads(buffers[key.data].splitlines()[-1]) if buffers[key.data] else {}
                            raise netns.NetworkError(
                                f"rank {key.data} of {ranks}, exit status {status}\n{said.get('error', '')}"
                            )
    finally:
        for ours, pid in pids.items():
            os.close(ours)
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [[json.loads(line) for line in each.splitlines()] for each in buffers]


def _child(
    rank: int, ranks: int, port: int, work: Callable[..., None], namespace: tuple[str, dict[str, str]] | None, pipe: int
) -> None:
    """Run the work of a rank, and end the process. `namespace`: name and environment variables."""
    status, file = 1, os.fdopen(pipe, "w")

    def emit(row: dict[str, Any]) -> None:
        file.write(json.dumps(row) + "\n")
        file.flush()

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it, too, and kills the ranks
        where = {"MASTER_ADDR": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
        if namespace is not None:
            name, where = namespace
            enter(name)
        os.environ.update({**where, "RANK": str(rank), "WORLD_SIZE": str(ranks)})
        import torch.distributed as dist

        c10d: Any = dist  # untyped: torch's stubs lack the store
        wait = timedelta(seconds=600)
        store = c10d.TCPStore(os.environ["MASTER_ADDR"], port, ranks, is_master=rank == 0, timeout=wait)
        work(rank, store, emit)
        barrier(store, "end", ranks)
        if rank == 0:
            time.sleep(0.2)  # as the host of the store, answer the last waits of the others
        status = 0
    except BaseException:
        emit({"error": traceback.format_exc()})
    finally:
        os._exit(status)


def barrier(store: Any, name: str, ranks: int) -> None:
    """Wait until all ranks have called this with the same name, which no earlier barrier had."""
    if store.add(f"{name} count", 1) == ranks:
        store.set(f"{name} done", b"1")
    store.wait([f"{name} done"])
