"""Local steps of sites that come, go and lag: rounds that a store of objects holds together.

:class:`codec.torch.rounds.rounds.Rounds` is public as ``codec.torch.Rounds``.
"""
