"""Functions run by real processes that are the ranks of a real Gloo group, and what befalls such processes."""

import ctypes
import gc
import importlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest

from support.faults import GONE

_CLONE_NEWNET = 0x40000000
_context = multiprocessing.get_context("forkserver")
# Modules that are slow to import: ranks are forked from a process that has them.
_context.set_forkserver_preload(["pytest", "hypothesis", "torch._dynamo", "torch.distributed.fsdp", "codec.torch"])


class Rank:
    """A process that does what it is told, as a rank of one group after the other.

    Parameters
    ----------
    namespace : str, optional
        The network namespace in which it lives, if not this one.
    """

    def __init__(self, namespace=None):
        self._pipe, there = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(there, namespace), daemon=True)
        self._process.start()
        there.close()

    def ask(self, function, *args):
        """Have it do function(*args)."""
        self._pipe.send((function, args))

    def answer(self, end):
        """Whether that went well, and what came of it; `end` is when it should be there, on the monotonic clock."""
        if not self._pipe.poll(max(0, end - time.monotonic())):
            return False, "hangs"
        try:
            good, result = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return True, GONE
        return good, pickle.loads(result) if good else result

    def thaw(self):
        """Have it go on that freezes, once it has."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        end = time.monotonic() + 10
        while stat.read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < end:
            time.sleep(0.001)
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self):
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe, namespace):
    import torch

    gc.freeze()  # what was imported: closing connections collects garbage
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server's children ignore it
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if namespace is None else "eth0"
    if namespace is not None:
        _enter(namespace)
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


def _enter(namespace):
    """Go over to a network namespace; os.setns came with Python 3.12."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


class Team:
    """Ranks that outlive their groups.

    Parameters
    ----------
    size : int
        How many.
    timeout : float
        Seconds, of their groups.
    namespaces : sequence of str, optional
        Where they live.
    limit : float
        Seconds that any answer may take.
    """

    def __init__(self, size, timeout=20, namespaces=None, limit=300):
        self._namespaces = namespaces or [None] * size
        self._timeout, self._limit = timeout, limit
        self._ranks = [Rank(namespace) for namespace in self._namespaces]
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

    def begin(self, function, *args):
        """Have all do function(rank, size, *args)."""
        for i, rank in enumerate(self._ranks):
            rank.ask(function, i, len(self._ranks), *args)

    def answers(self, of=None):
        """What came of it, in the order of ranks; of these ranks, of all if left out. GONE of those who have died."""
        end = time.monotonic() + self._limit
        found = {i: self._ranks[i].answer(end) for i in (range(len(self._ranks)) if of is None else of)}
        if bad := [f"rank {i}: {result}" for i, (good, result) in found.items() if not good]:
            pytest.fail("\n".join(bad))
        return [result for _, result in found.values()]

    def all(self, function, *args):
        """Both."""
        self.begin(function, *args)
        return self.answers()

    def one(self, i, function, *args):
        """What comes of function(*args) on one rank."""
        self._ranks[i].ask(function, *args)
        return self.answers([i])[0]

    def replace(self, i):
        """A new process in the place of one."""
        self._ranks[i].close()
        self._ranks[i] = Rank(self._namespaces[i])

    def regroup(self, backend="gloo"):
        """A new group of all; what is left of the one before is given up."""
        assert self.all(_join, f"{self._folder.name}/{next(self._groups)}", self._timeout, backend) == [None] * len(
            self._ranks
        )


def _join(rank, size, path, timeout, backend):
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = timedelta(seconds=timeout)
    importlib.import_module("codec.torch")  # a backend's name is known from then on
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size, timeout=timeout)


def ranks(size, function, *args, backend="gloo", timeout=20, limit=300, gone=()):
    """Results of function(rank, size, *args) on all ranks; those in `gone` are expected to die."""
    with Team(size, timeout, limit=limit) as team:
        team.regroup(backend)
        team.begin(function, *args)
        left = [i for i in range(size) if i not in gone]
        results = dict(zip(left, team.answers(left), strict=True))
        for i in left:
            assert results[i] is not GONE, f"rank {i} has died"
        return [results.get(i, GONE) for i in range(size)]
