"""Arithmetic and algorithms of collectives: tensors to frames, sums, slices, and the exchange of phases.

Modules here read tensors of the caller and return results in memory of their own. They never write to tensors of the
caller, and keep no state between collectives.
"""
