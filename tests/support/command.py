"""The command `codec`, run in this process."""

from codec.__main__ import main


def run(*arguments):
    """Run the command, and return its exit status."""
    return main([str(a) for a in arguments])
