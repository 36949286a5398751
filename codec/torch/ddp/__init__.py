"""Communication hook of DistributedDataParallel.

Modules here know parameters, buckets, policies and steps. They never send messages themselves: gradients go through
:mod:`codec.torch.reduction`, residuals through :mod:`codec.torch.feedback`.
"""
