"""Public collectives on tensors, lists of tensors and bytes.

Modules in this package check arguments, start a collective in the group's thread, and store its result. They depend
neither on algorithms nor on models.
"""
