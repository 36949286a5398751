"""Public collectives on tensors and lists of tensors.

Modules in this package check arguments, start a collective in the group's thread, and store its result. They depend
neither on algorithms nor on models.
"""
