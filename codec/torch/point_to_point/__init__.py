"""Messages between two ranks: send and recv.

Modules in this package do not run collectives, so an error on one rank is reported only to its peer.
"""
