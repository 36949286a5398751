"""Frames of the gradients in bench/data have the sizes in sizes.csv, so that a commit shows any change of sizes."""

import difflib

from support.frame_sizes import committed, measured


def test_sizes_of_frames_are_those_of_the_table():
    was, now = ([",".join(row) for row in rows] for rows in (committed(), measured()))
    changed = [line for line in difflib.ndiff(was, now) if line[0] in "+-"]
    assert not changed, f"{changed}: if this is meant, run `PYTHONPATH=tests python -m support.frame_sizes`"
