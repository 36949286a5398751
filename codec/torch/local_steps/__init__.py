"""Local steps: optimizer steps without communication, then the mean of the ranks' parameter changes (DiLoCo).

Modules here keep the parameters of the last synchronization, and decide when ranks synchronize. They send nothing but
by public collectives, and never take a step of the program's optimizer.
"""
