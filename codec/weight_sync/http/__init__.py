"""Store over HTTP: the server and its threads, clients, mirrors that forward files, tokens and certificates."""
