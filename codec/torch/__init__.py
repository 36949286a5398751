"""Collectives and hooks for torch.distributed that compress tensors: ranks exchange encoded frames.

Only the names in ``__all__`` are public. Importing this package registers the torch.distributed backend `codec`.

>>> import codec.torch
>>> gradient = torch.ones(1000)
>>> codec.torch.all_reduce(gradient, codec.Float8(), op="mean")
>>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
>>> hook = codec.torch.ddp_hook(codec.Float8()).register(model)
"""

import importlib
from typing import TYPE_CHECKING

from codec.torch import ops as ops
from codec.torch.auto.quality import Auto
from codec.torch.autograd.saved import saved_tensors
from codec.torch.backend import BackendOptions, ProcessGroup, register_backend
from codec.torch.collectives.calls import all_gather, all_reduce, all_to_all, reduce_scatter
from codec.torch.collectives.rows import all_to_all_rows
from codec.torch.ddp.hook import Hook
from codec.torch.ddp.make import ddp_hook
from codec.torch.ddp.policy import Policy
from codec.torch.feedback.feedback import Feedback
from codec.torch.fsdp.all_gather import FsdpAllGather
from codec.torch.fsdp.all_reduce import FsdpAllReduce
from codec.torch.fsdp.reduce_scatter import FsdpReduceScatter
from codec.torch.group.communicator import close_group, group_stats
from codec.torch.group.exchange import all_to_all_bytes
from codec.torch.local_steps.local_steps import LocalSteps
from codec.torch.one_bit_adam import OneBitAdam, VarianceSchedule
from codec.torch.parameter_server.client import ParameterClient
from codec.torch.parameter_server.server import ParameterServer
from codec.torch.point_to_point.send_recv import recv, send
from codec.torch.rounds.rounds import Rounds
from codec.torch.saving.per_rank import per_rank
from codec.torch.saving.state import pack_state, unpack_state

if TYPE_CHECKING:  # at run time, __getattr__ imports these names on first use
    from codec.torch import pipelining as pipelining
    from codec.torch.saving.reader import checkpoint_reader
    from codec.torch.saving.writer import checkpoint_writer

__all__ = [
    "Auto",
    "BackendOptions",
    "Feedback",
    "FsdpAllGather",
    "FsdpAllReduce",
    "FsdpReduceScatter",
    "Hook",
    "LocalSteps",
    "OneBitAdam",
    "ParameterClient",
    "ParameterServer",
    "Policy",
    "ProcessGroup",
    "Rounds",
    "VarianceSchedule",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_bytes",
    "all_to_all_rows",
    "checkpoint_reader",
    "checkpoint_writer",
    "close_group",
    "ddp_hook",
    "group_stats",
    "pack_state",
    "per_rank",
    "recv",
    "reduce_scatter",
    "saved_tensors",
    "send",
    "unpack_state",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "ops", "pipelining", "__all__", "__doc__", "__file__", "__name__", "__path__"])


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any attribute

    def __getattr__(name: str) -> object:
        """Import modules of `saving`, or `pipelining`, when a name of them is first used: they are slow to import."""
        if name in ("checkpoint_reader", "checkpoint_writer"):
            return getattr(importlib.import_module(f"codec.torch.saving.{name.removeprefix('checkpoint_')}"), name)
        if name == "pipelining":
            return importlib.import_module("codec.torch.pipelining")
        raise AttributeError(f"module 'codec.torch' has no attribute {name!r}")


register_backend()  # makes init_process_group("codec") work
