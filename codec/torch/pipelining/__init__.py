"""Pipeline parallelism with compressed activations and gradients.

Provisional: may change in any version.

Only the names in ``__all__`` are public. The package needs torch.distributed.pipelining.

>>> from codec.torch.pipelining import CompressedStage
>>> stage = CompressedStage(torch.nn.Linear(8, 8), 0, 1, "cpu", forward=codec.Quantize(4, rounding="nearest"))
"""

from codec.torch.pipelining.attempt import attempts
from codec.torch.pipelining.calls import recv_activation, recv_gradient, send_activation, send_gradient
from codec.torch.pipelining.settings import Deltas
from codec.torch.pipelining.stage import CompressedStage

__all__ = [
    "CompressedStage",
    "Deltas",
    "attempts",
    "recv_activation",
    "recv_gradient",
    "send_activation",
    "send_gradient",
]
