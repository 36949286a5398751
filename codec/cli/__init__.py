"""The command ``codec``: one module for each group of commands.

Modules of commands define ``add_commands``, which adds parsers, and functions that run. What only some commands need is
imported when they run, so that all commands start quickly. ``console`` has their common parts: outputs, progress, JSON.
"""
