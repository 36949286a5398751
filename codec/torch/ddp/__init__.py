"""Communication hook of DistributedDataParallel.

This package handles parameters, buckets, policies and steps. It sends no messages itself: :mod:`codec.torch.reduction`
reduces the gradients, and :mod:`codec.torch.feedback` adds the residuals.
"""
