"""Public collectives on tensors, lists of tensors and bytes.

Modules here check arguments, begin a collective in the group's thread, and store its result. They never know an
algorithm or a model.
"""
