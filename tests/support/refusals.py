"""Errors of ranks that refuse to connect to each other."""

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch


def connecting_errors(rank):
    """Return the errors that one of two ranks gets in a collective, and in send or recv."""
    errors = []
    for call in (
        lambda: codec.torch.all_reduce(torch.ones(3)),
        lambda: codec.torch.send(b"", 0, tag=1) if rank else codec.torch.recv(1, tag=1),
    ):
        with pytest.raises(codec.PeerError) as raised:
            call()
        errors.append(str(raised.value))
        dist.barrier()
    return errors
