"""MX formats in all-reduce: the table of docs/methods/mx-formats.md, printed by examples/mx_all_reduce.py."""

import runpy
from pathlib import Path

from support.ranks import run_ranks

ROOT = Path(__file__).parents[3]


def _table(rank, size):
    example = runpy.run_path(str(ROOT / "examples/mx_all_reduce.py"))
    return example["table_of"](example["GRADIENT"])


def test_page_shows_the_errors_that_the_example_prints():
    tables = run_ranks(4, _table)
    assert tables == [tables[0]] * 4
    page = (ROOT / "docs/methods/mx-formats.md").read_text()
    assert "\n".join(["$ torchrun --nproc-per-node 4 examples/mx_all_reduce.py", *tables[0], "```"]) in page
