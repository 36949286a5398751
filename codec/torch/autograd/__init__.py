"""Frames in autograd and in compiled graphs: compressed saved activations, and encode and decode operators."""
