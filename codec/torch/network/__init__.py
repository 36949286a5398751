"""TCP connections between ranks: listening ports, point-to-point connections, and the mesh for collectives.

This package sends messages of bytes, and does not depend on frames or tensors. Each message of the mesh contains the
number of its collective, so that several collectives share the connections.
"""
