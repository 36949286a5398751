"""Adapters to other frameworks: gradients, weight updates, KV caches, chunked arrays and federated learning.

Provisional: may change in any version.

Each module imports the framework that it is named after. Modules for gradients register a hook of :mod:`codec.torch`
with the DistributedDataParallel that the framework creates. No module changes the training algorithm of a framework.
"""
