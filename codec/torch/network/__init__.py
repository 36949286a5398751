"""TCP connections between ranks: the port of a rank, connections of two ranks, and the mesh that collectives use.

Nothing here knows frames, tensors or collectives: messages are bytes. A message of the mesh names the collective that
it belongs to, so that messages of several collectives share the connections.
"""
