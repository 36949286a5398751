"""Replicas of a model that differ between ranks: changes of their parameters, and means of these over the ranks.

This package knows the values of the last synchronization (anchors), sends changes, and applies means to parameters. It
never decides when ranks synchronize, and never calls ``step()`` of the program's optimizer.
"""
