"""Weights of one version, to which updates are applied: in memory, in a folder, or in a folder that receivers share."""
