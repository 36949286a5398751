"""Activations of pipeline stages as deltas to the previous activations of the same samples (AQ-SGD)."""
