"""Local steps: optimizer steps without communication, then the mean of the ranks' parameter changes (DiLoCo).

This package stores the parameters of the last synchronization, and decides when ranks synchronize. It communicates only
by the public collectives of :mod:`codec.torch`, and never calls ``step()`` of the program's optimizer.
"""
