"""Algorithms of collectives: split tensors into slices, encode and sum them, and exchange frames between ranks.

Modules in this package read tensors of the caller, and return results in newly allocated memory. Only deferred decoding
writes to the caller's tensors, after all ranks have agreed. No state is kept between collectives.
"""
