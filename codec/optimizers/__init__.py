"""Optimizers, whose next step decides how many bits of a gradient :class:`codec.Truncate` drops.

The step of an optimizer is (A + g) * c for a gradient g, with A and c that do not depend on g. Where A is much larger
than g, the step rounds the last bits of g away. Truncate drops them, by the difference of the exponents of A and g, so
that a receiver with the same state computes the same levels.

Arguments have the names and defaults of torch.optim, and `step` is torch's ``state["step"]``: the number of steps
taken before this one. :func:`from_optimizer` reads them from a torch optimizer, :func:`state_of` the state of a
parameter. :meth:`codec.Truncate.bind` takes both::

    spec = codec.Truncate().bind(from_optimizer(optimizer), **state_of(optimizer, parameter))

State arrays are those before the step: ``theta`` the parameters, ``m`` the ``momentum_buffer`` or ``exp_avg``, ``v``
the ``exp_avg_sq``, ``square_avg`` or ``sum``. Without ``m`` and ``v`` it is the first step. g is the gradient of the
step: averaged, clipped and unscaled, unless `grad_scale` names the scale of a GradScaler. Parameter groups of a bucket
are a list, ``bind([(offset, optimizer), ...], ...)``: each optimizer applies from its offset on. No bit is dropped with
``amsgrad``, ``centered`` or ``maximize``, for which A is not known.

For most optimizers Truncate bounds the change of the parameter. Lion and Muon have no such bound by value: a sign
jumps, and an orthogonalized matrix depends on all its values. There Truncate bounds the change of the momentum.
docs/guides/optimizers.md derives all formulas and bounds, and shows how to solve the step of another optimizer for A.

References
----------
.. [1] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024, table 1. The
   table has eta instead of AdaGrad's decayed learning rate, and sqrt(v) instead of its bias-corrected value.
"""

from codec.optimizers.base import Optimizer, Terms
from codec.optimizers.custom import Custom
from codec.optimizers.formulas import (
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Momentum,
    Muon,
    NAdam,
    Nesterov,
    RMSprop,
)
from codec.optimizers.from_torch import from_optimizer, state_of

__all__ = [
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Custom",
    "Lion",
    "Momentum",
    "Muon",
    "NAdam",
    "Nesterov",
    "Optimizer",
    "RMSprop",
    "Terms",
    "from_optimizer",
    "state_of",
]
