"""Compressed gradients in Accelerate, Lightning and Transformers, and updates of weights in vLLM, TRL and verl.

Each module imports its framework. Those for gradients register a hook of :mod:`codec.torch` with the
DistributedDataParallel that the framework makes. No module changes how a framework trains.
"""
