"""Compressed gradients in Accelerate, Lightning and Transformers: one import for each framework.

Each module imports its framework, and registers a hook of :mod:`codec.torch` with the DistributedDataParallel that the
framework makes. No module changes how a framework trains.
"""
