"""Stores of objects: local folders, and buckets by fsspec. Updates of weights and rounds of sites are written there.

A store is one flat folder of named objects, which are written as a whole or not at all.
"""
