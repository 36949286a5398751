"""Frames between two ranks: send, recv, and connections by TCP that need no process group.

Modules here never run a collective: an error on one rank is reported to its peer only.
"""
