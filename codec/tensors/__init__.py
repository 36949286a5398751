"""Views of the tensors of any library as dtype, shape and address."""
