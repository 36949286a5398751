"""Transport of collectives: messages and agreement of ranks (docs/spec/protocol.md, sections 3 to 6).

Modules in this package send and receive frames, numbers and uncompressed values, and count bytes and seconds. They do
not depend on the kind of a collective.
"""
