"""Hooks of FSDP2 and HSDP that send frames.

Modules here never choose a spec by parameter: FSDP passes flat tensors of whole modules.
"""
