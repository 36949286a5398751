"""Frames within autograd and compiled graphs: activations saved as frames, and operators of torch.library."""
