"""Frames of the gradients in bench/data have the sizes of sizes.csv, so that a change of sizes is seen in a review."""

from support.frame_sizes import committed, measured


def test_sizes_of_frames_are_those_of_the_table():
    changed = [f"{now}, not {was}" for now, was in zip(measured(), committed(), strict=True) if now != was]
    assert not changed, f"{changed}: if this is meant, run `PYTHONPATH=tests python -m support.frame_sizes`"
