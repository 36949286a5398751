"""Connections between ranks, and the bytes that travel over them (docs/protocol.md, sections 2 to 4).

Modules here send and receive frames, numbers and uncompressed values, and count bytes and seconds. They never encode,
decode or sum, and do not know which collective they serve.
"""
