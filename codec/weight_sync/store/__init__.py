"""Stores of updates in folders and buckets, and readers of folders, buckets and servers."""
