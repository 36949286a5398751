"""Collectives for FSDP2 and HSDP that send frames.

All parameters of a model share one spec, because FSDP2 passes flat tensors of whole modules.
"""
