"""Algorithms of collectives: split tensors into slices, encode and sum them, and exchange frames between ranks.

Before all ranks have agreed that a collective succeeded, modules in this package only read the caller's tensors; they
write only to ``out=`` and to newly allocated memory. No state is kept between collectives.
"""
