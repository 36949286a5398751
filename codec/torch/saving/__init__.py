"""Checkpoints of torch whose tensors are frames: streams for torch.distributed.checkpoint, and packed state dicts."""
