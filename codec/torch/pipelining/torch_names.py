"""Names of torch.distributed.pipelining that CompressedStage overrides or reads, and the check that torch has them."""

import inspect

import torch
from torch.distributed.pipelining import PipelineStage

from codec import EngineError

TESTED = "2.13"  # versions of torch

# Overridden methods, with the parameters that are used by position.
PUBLIC = {
    "forward_one_chunk": ("fwd_chunk_id", "args", "kwargs"),
    "backward_one_chunk": ("bwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_bwd_send_ops": ("bwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "clear_runtime_states": (),
}
PRIVATE = {
    # The first step passes keywords of schedule.step() to the module, to learn the shapes of its outputs.
    "_prepare_forward_infra": ("num_microbatches", "args", "kwargs"),
}
ATTRIBUTES = ("has_backward", "group", "group_rank", "stage_index_to_group_rank", "submod")  # of an instance


def check_methods() -> None:
    """Raise EngineError if a method is missing, or has other parameters."""
    for name, parameters in (PUBLIC | PRIVATE).items():
        method = getattr(PipelineStage, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        if method is None or found[: len(parameters)] != parameters:
            raise EngineError(_text(f"{name}({', '.join(parameters)})"))


def check_attributes(stage: PipelineStage) -> None:
    """Raise EngineError if an attribute of a stage is missing."""
    for name in ATTRIBUTES:
        if not hasattr(stage, name):
            raise EngineError(_text(name))


def _text(name: str) -> str:
    return (
        f"torch {torch.__version__} has no PipelineStage.{name}: codec.torch.pipelining is tested with torch {TESTED}"
    )
