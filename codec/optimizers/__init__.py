"""Descriptions of optimizers, from which :class:`codec.Truncate` computes how many bits of a gradient it can drop.

An optimizer computes the new parameter as (A + g) * c from the gradient g, where A and c do not depend on g. If A is
much larger than g, this addition rounds the last bits of g away. Truncate drops these bits. It computes their number
from the difference of the exponents of A and g, so that a receiver with the same state computes the same levels.

Arguments have the names and defaults of torch.optim. `step` is torch's ``state["step"]``, the number of steps taken
before this one. :func:`from_optimizer` reads the arguments from a torch optimizer, and :func:`state_of` the state of a
parameter. Pass both to :meth:`codec.Truncate.bind`::

    spec = codec.Truncate().bind(from_optimizer(optimizer), **state_of(optimizer, parameter))

State arrays have their values before the step: ``theta`` is the parameter, ``m`` the ``momentum_buffer`` or
``exp_avg``, ``v`` the ``exp_avg_sq``, ``square_avg`` or ``sum``. Leave out ``m`` and ``v`` for the first step. g is the
gradient that the step uses: averaged, clipped and unscaled. If it is still scaled by a GradScaler, pass the scale as
`grad_scale`. If a bucket contains several parameter groups, pass a list, ``bind([(offset, optimizer), ...], ...)``:
each optimizer applies from its offset on. With ``amsgrad``, ``centered`` or ``maximize``, A is not known, and no bit is
dropped.

For most optimizers, Truncate bounds the change of each parameter value. For Lion and Muon there is no such bound:
Lion's step is a sign, which can flip, and each value of Muon's orthogonalized matrix depends on all gradient values.
For Lion and Muon, Truncate bounds the change of the momentum instead. docs/guides/optimizers.md has all formulas
and bounds, and shows how to solve the step of another optimizer for A.

References
----------
.. [1] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024, table 1. The
   table has eta instead of AdaGrad's decayed learning rate, and sqrt(v) instead of its bias-corrected value.
"""

from codec.optimizers.base import Optimizer
from codec.optimizers.custom import Custom
from codec.optimizers.formulas import (
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    NAdam,
    RMSprop,
)
from codec.optimizers.from_torch import Formula, from_optimizer, state_of

__all__ = [
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Custom",
    "Formula",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "RMSprop",
    "from_optimizer",
    "state_of",
]
