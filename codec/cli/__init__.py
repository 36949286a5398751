"""The command ``codec``: one module for each group of commands.

Each of these modules defines ``add_commands``, which adds the parsers, and the functions that run the commands. Imports
that only some commands need are made when the command runs, so that all commands start quickly. ``console`` contains
functions that several commands use, for outputs, progress and JSON.
"""
