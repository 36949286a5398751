"""Functions run by real processes that are the ranks of a real Gloo group."""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

import pytest

GONE = "gone"  # the result of a rank that was killed
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "codec.torch"])


def _rank(function, rank, size, path, backend, timeout, out, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            backend, init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        result = function(rank, size, *args)
        out.send((True, pickle.dumps(result)))
    except BaseException:
        out.send((False, traceback.format_exc()))
    os._exit(0)  # nobody waits for those who are gone


def ranks(size, function, *args, backend="gloo", timeout=20, limit=100, gone=()):
    """Results of function(rank, size, *args) on all ranks; those in `gone` are expected to die."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            here, there = _context.Pipe(duplex=False)
            p = _context.Process(
                target=_rank, args=(function, rank, size, f"{folder}/store", backend, timeout, there, args), daemon=True
            )
            p.start()
            there.close()
            pipes.append(here)
            processes.append(p)
        end = time.monotonic() + limit
        results = []
        try:
            for rank, pipe in enumerate(pipes):
                if rank in gone:
                    results.append(GONE)
                    continue
                if not pipe.poll(max(0, end - time.monotonic())):
                    pytest.fail(f"rank {rank} hangs")
                try:
                    good, result = pipe.recv()
                except EOFError:
                    pytest.fail(f"rank {rank} has died")
                if not good:
                    pytest.fail(f"rank {rank}:\n{result}")
                results.append(pickle.loads(result))
        finally:
            for p in processes:
                p.kill()
                p.join()
        return results
