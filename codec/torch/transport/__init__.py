"""Collectives in flight, and the messages of their parts (docs/spec/protocol.md, sections 3 to 6).

Modules here send and receive frames, numbers and uncompressed values, and count bytes and seconds. They never encode,
decode or sum, and do not know which collective they serve.
"""
