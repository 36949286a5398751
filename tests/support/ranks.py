"""Run functions in processes that are the ranks of a real torch.distributed group."""

import ctypes
import gc
import importlib
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest

from support.faults import KILLED

_CLONE_NEWNET = 0x40000000
_context = multiprocessing.get_context("forkserver")
# These modules take long to import. Ranks are forked from a process that has imported them.
_context.set_forkserver_preload(["pytest", "hypothesis", "torch._dynamo", "torch.distributed.fsdp", "codec.torch"])


class Rank:
    """Process that runs one function at a time. It is a rank of one group after another.

    Parameters
    ----------
    namespace : str, optional
        Network namespace of the process; by default the caller's.
    """

    def __init__(self, namespace=None):
        self._pipe, other_end = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(other_end, namespace), daemon=True)
        self._process.start()
        other_end.close()

    def start(self, function, *args):
        """Start function(*args) in the process."""
        self._pipe.send((function, args))

    def poll(self, seconds):
        """Wait up to some seconds; return True if the function has returned, or the process has died."""
        return self._pipe.poll(seconds)

    def result(self, deadline):
        """Wait for the function's result until `deadline`, in seconds of the monotonic clock.

        Returns (True, result), or (False, message) after an error.

        The result is KILLED if the process died.
        """
        if not self._pipe.poll(max(0, deadline - time.monotonic())):
            return False, "hangs"
        try:
            succeeded, result = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return True, KILLED
        return succeeded, pickle.loads(result) if succeeded else result

    def await_stop(self):
        """Wait up to ten seconds until the process has stopped itself (SIGSTOP)."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        deadline = time.monotonic() + 10
        while stat.read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < deadline:
            time.sleep(0.001)

    def resume(self):
        """Wait until the process has stopped itself, and let it continue."""
        self.await_stop()
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self):
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe, namespace):
    """Receive functions from a pipe and run them, until the pipe is closed."""
    import torch

    gc.freeze()  # exempt imported modules from the garbage collections that closing connections triggers
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children of the fork server ignore SIGINT
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if namespace is None else "eth0"
    if namespace is not None:
        enter_namespace(namespace)
    importlib.import_module("codec.torch")
    _settings_at_start.update(_settings())
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, pickle.dumps(function(*args))
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


def enter_namespace(namespace):
    """Enter a network namespace. Python has os.setns only from 3.12 on."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


class RankPool:
    """Rank processes that can be used for several groups, one after another.

    Parameters
    ----------
    size : int
        Number of ranks.
    timeout : float
        Timeout of the groups, in seconds.
    namespaces : sequence of str, optional
        Network namespace of each rank.
    limit : float
        Seconds after which a function is considered hung.
    ranks : sequence of Rank, optional
        One process for each rank; by default, new processes are started.
    """

    def __init__(self, size, timeout=20, namespaces=None, limit=300, ranks=None):
        self._namespaces = namespaces or [None] * size
        self._timeout, self._limit = timeout, limit
        self._ranks = list(ranks or map(Rank, self._namespaces))
        self._folder = tempfile.TemporaryDirectory()
        self._groups = itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self._ranks:
            rank.close()
        self._folder.cleanup()

    def __getitem__(self, i):
        return self._ranks[i]

    def start(self, function, *args):
        """Start function(rank, size, *args) on all ranks."""
        for i, rank in enumerate(self._ranks):
            rank.start(function, i, len(self._ranks), *args)

    def results(self, of=None):
        """Return the results of the ranks in `of`, by default of all ranks; KILLED for a rank that died."""
        deadline = time.monotonic() + self._limit
        found = {i: self._ranks[i].result(deadline) for i in (range(len(self._ranks)) if of is None else of)}
        if failed := [f"rank {i}: {result}" for i, (succeeded, result) in found.items() if not succeeded]:
            pytest.fail("\n".join(failed))
        return [result for _, result in found.values()]

    def run(self, function, *args):
        """Run function(rank, size, *args) on all ranks, and return the results in rank order."""
        self.start(function, *args)
        return self.results()

    def run_on(self, i, function, *args):
        """Run function(*args) on rank `i`, and return the result."""
        self._ranks[i].start(function, *args)
        return self.results([i])[0]

    def replace(self, i):
        """Kill the process of rank `i`, and start a new one in its place."""
        self._ranks[i].close()
        self._ranks[i] = Rank(self._namespaces[i])

    def leave(self):
        """Destroy the group, and remove the processes from the pool.

        Returns the processes for use in another pool, or [] if a test has patched their code.
        """
        if not all(self.run(_leave)):
            return []
        left, self._ranks = self._ranks, []
        return left

    def new_group(self, backend="gloo"):
        """Destroy the group, and create another one that consists of all ranks."""
        path = f"{self._folder.name}/{next(self._groups)}"
        assert self.run(_join, path, self._timeout, backend) == [None] * len(self._ranks)


def _join(rank, size, path, timeout, backend):
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    importlib.import_module("codec.torch")  # the import registers the backend `codec`
    timeout = timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size, timeout=timeout)


def _leave(rank, size):
    """Destroy the group and reset random states; return True if no test's patch is left in this process."""
    import torch
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    random.seed(0)
    torch.manual_seed(0)
    now = _settings()
    return all(now.get(key) == value for key, value in _settings_at_start.items())


_settings_at_start = {}  # result of _settings() when the process of a rank started


def _settings():
    """Return the code and settings of this process that a test could have patched."""
    import torch

    modules = {name: module for name, module in sys.modules.items() if name.startswith("codec.")}
    found = {
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "backends": dict(torch.distributed.Backend._plugins),
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
    }
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()):
            if callable(value) or (isinstance(value, int | float | str) and attribute.isupper()):
                found[name, attribute] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                members = {key: member for key, member in vars(value).items() if not key.startswith("__")}
                found |= {(value, key): id(_without_torchs_hook(member)) for key, member in members.items()}
            if isinstance(value, logging.Logger):
                found[value] = value.level, list(value.handlers), "info" in vars(value), "warning" in vars(value)
    return found


def _without_torchs_hook(member):
    """Return a method as its class defines it: torch wraps the method ``step`` when an optimizer is first created."""
    return member.__wrapped__ if getattr(member, "hooked", False) else member


_idle = []  # processes that the next call of run_ranks can use


def close_idle_ranks():
    """Kill the processes that :func:`run_ranks` keeps."""
    while _idle:
        _idle.pop().close()


def run_ranks(size, function, *args, backend="gloo", timeout=20, limit=300, killed=(), fresh=False):
    """Run function(rank, size, *args) on all ranks of a new group, and return the results in rank order.

    The next call in the same test module uses the same processes, because starting a process takes 30 ms of CPU time.
    After a call that fails, kills ranks or patches code, the processes are not used again.

    Parameters
    ----------
    size : int
        Number of ranks.
    function : callable
        Function of a module that the ranks can import.
    *args
        Further arguments of the function.
    backend : str
        Backend of the group.
    timeout : float
        Timeout of the group, in seconds.
    limit : float
        Seconds after which the function is considered hung.
    killed : collection of int
        Ranks that are expected to die; their results are KILLED.
    fresh : bool
        True: start processes for this call alone. Functions that make meshes of several dimensions need that: torch
        caches meshes by shape, with the names of groups that have been destroyed.
    """
    # A process keeps its rank: torch caches offsets of shards, by mesh and not by rank.
    processes = None if killed or fresh else [_idle.pop(0) if _idle else Rank() for _ in range(size)]
    with RankPool(size, timeout, limit=limit, ranks=processes) as ranks:
        ranks.new_group(backend)
        ranks.start(function, *args)
        left = [i for i in range(size) if i not in killed]
        results = dict(zip(left, ranks.results(left), strict=True))
        for i in left:
            assert results[i] is not KILLED, f"rank {i} has died"
        if processes:
            _idle[:0] = ranks.leave()
        return [results.get(i, KILLED) for i in range(size)]
