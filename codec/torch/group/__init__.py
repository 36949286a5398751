"""Life of a collective: coroutines, the worker thread of a group, and handles of collectives in flight.

Modules here run a collective's steps in order and report errors to all ranks. They never read tensors or frames.
"""
