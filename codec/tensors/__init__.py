"""Tensors of any library as dtype, shape and address."""
