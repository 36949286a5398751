"""Checkpoints of torch.distributed.checkpoint whose items are frames: streams, lists of items, chains of changes.

This package does not import torch, and unpickles nothing. :mod:`codec.torch.saving` writes and loads the checkpoints.
"""
