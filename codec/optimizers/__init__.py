"""How many bits of a gradient an optimizer's step can tell: what :class:`codec.Truncate` goes by.

A step is (something that does not depend on the gradient g) + (something) * g. A is the first over the second, element
by element. Where A is much larger than g, the last bits of g fall below those of the parameter and may go: E =
exponent(A) - exponent(g), from exponents alone, so that a receiver with the same state finds the same levels.

Parameters have the names and defaults that they have in torch.optim, and `step` is torch's ``state["step"]``: how many
steps were taken before this one. :func:`from_optimizer` makes the metric of an optimizer, :func:`state_of` the state of
one of its parameters.

State arrays are those before the step, as torch.optim has them: ``theta`` the parameters, ``m`` the momentum buffer
or ``exp_avg``, ``v`` the ``exp_avg_sq``, ``square_avg`` or ``sum``. Without ``m`` or ``v`` it is the first step. g is
the gradient that the optimizer sees: averaged, clipped, and divided by GradScaler's scale unless `grad_scale` says
what it is. Parameter groups with other numbers inside a bucket: ``metric=[(offset, metric), ...]``, each for the
values from its offset on. With ``amsgrad``, ``centered`` or ``maximize``, for which the formulas do not hold, no bit
is dropped.

References
----------
.. [1] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024, table 1. It
   prints eta for AdaGrad's decayed rate and sqrt(v) for the bias-corrected one.
"""

from codec.optimizers.custom import Custom
from codec.optimizers.formulas import SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, Optimizer, RMSprop, Terms
from codec.optimizers.from_torch import from_optimizer, state_of

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Custom",
    "Optimizer",
    "Momentum",
    "Nesterov",
    "RMSprop",
    "Terms",
    "from_optimizer",
    "state_of",
]
