"""Send activations of pipeline stages as deltas from the previous activations of the same samples (AQ-SGD)."""
