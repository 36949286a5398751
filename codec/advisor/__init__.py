"""Advice on which codec makes an all-reduce fastest on a link."""
