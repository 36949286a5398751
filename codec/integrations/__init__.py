"""Gradients, weights, KV caches, chunks of arrays and federated learning in the frameworks of others.

Each module imports its framework. Those for gradients register a hook of :mod:`codec.torch` with the
DistributedDataParallel that the framework makes. No module changes how a framework trains.
"""
