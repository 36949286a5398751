"""Views that describe a tensor of any library by dtype, shape and address."""
