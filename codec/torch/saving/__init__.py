"""Checkpoints that store tensors as frames, for torch.distributed.checkpoint (streams) and torch.save (state dicts)."""
