"""Local steps: optimizer steps without communication, then the mean of the ranks' parameter changes (DiLoCo).

This package decides when ranks synchronize, and saves and restores the state of a training. It never computes changes
or sends them itself, and never calls ``step()`` of the program's optimizer.
"""
