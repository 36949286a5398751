"""Bytes of updates: shards, kinds and digests of tensors, the order of versions, parts, and lists of updates."""
