"""Run collectives as coroutines in a worker thread of each group, and return handles for those in flight.

Modules in this package run the steps of a collective in order, and report errors to all ranks. They do not read tensors
or frames. The all-to-all of bytes is here, since checkpoints of all layers above use it.
"""
