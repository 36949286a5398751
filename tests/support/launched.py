"""Run functions in processes that have the environment variables of torchrun."""

import os
import socket

from support.ranks import RankPool


def run(size, function, *args):
    """Run function(rank, size, *args) in processes with torchrun's environment variables, and return the results."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    with RankPool(size, limit=300) as ranks:
        return ranks.run(_launched, port, function, *args)


def _launched(rank, size, port, function, *args):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }
    return function(rank, size, *args)
