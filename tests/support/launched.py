"""Processes with the environment that torchrun makes."""

import os
import socket

from support.ranks import RankPool


def run(size, function, *args):
    """Return the results of function(rank, size, *args) on processes with the environment of torchrun."""
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
