"""bench/network/presets.py continues an interrupted run, and replaces a page's tables if rows for them exist."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/network"))
import preset_tables
import presets

PAGE = """before

<!-- presets: small float32 -->
old
<!-- end presets -->

<!-- presets: small float32 100mbit/50 -->
narrow
<!-- end presets -->

<!-- presets: large -->
<!-- end presets -->
"""


def rows():
    of = {"model": "small", "dtype": "float32", "values": 900_000, "share": 0.15}
    times = [("none", "20mbit/0", 2000.0), ("small", "20mbit/0", 250.0), ("small", "100mbit/50", 80.0)]
    found = [of | {"method": method, "link": link, "step_ms": ms, "steps": 5} for method, link, ms in times]
    loss = {"model": "small", "dtype": "float32", "method": "small", "link": "none/0", "loss": 2.25, "steps": 250}
    return [*found, of | {"method": "compute", "link": "none/0", "step_ms": 50.0, "steps": 5}, loss]


def test_finished_cells_are_not_measured_again(tmp_path):
    path = str(tmp_path / "new/links.json")
    results = presets.Results(path, {"steps": 5})
    for row in rows():
        results.add(row)
    cells = [presets.Cell("small", "float32", "small", link) for link in ("20mbit/0", "1gbit/0", "none/0")]
    assert presets.Results(path, {"steps": 5}).missing(cells) == [cells[1]]
    with pytest.raises(SystemExit, match="measured with another steps"):
        presets.Results(path, {"steps": 6})
    Path(path).write_text(json.dumps([]))
    with pytest.raises(SystemExit, match="not a file of"):
        presets.Results(path, {"steps": 5})


def test_links_of_a_network_come_before_the_loss_of_the_method(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["presets.py", "--links", "20mbit/0", "100mbit/50", "--methods", "compute", "small"]
    )
    runs = presets.runs_of(presets.cells_of(presets.arguments()))
    assert list(runs) == [
        (model, dtype, rtt) for model in presets.MODELS for dtype in presets.DTYPES for rtt in (0, 50)
    ]
    links = [(cell.method, cell.link) for cell in runs["small", "float32", 0]]
    assert links == [("compute", "none/0"), ("small", "20mbit/0"), ("small", "none/0")]


def test_loss_needs_the_steps_that_links_take(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["presets.py", "--loss-steps", "10", "0"])
    with pytest.raises(SystemExit, match="--loss-steps: timing small takes"):
        presets.cells_of(presets.arguments())


def test_tables_of_a_page_are_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for _ in range(2):  # twice: the marker comments must survive the first replacement
        preset_tables.write(rows(), page)
        whole = """
0.9 M parameters, milliseconds a step. Computing alone takes 50 ms in float32. Losses are those after 250 steps.

| preset | bytes | 20 Mbit/s | 100 Mbit/s, 50 ms | loss |
| :-- | --: | --: | --: | --: |
| no codec | 100% | 2,000 |  |  |
| `"small"` | 15.0% | 250 (8.0x) | 80 | 2.2500 |
"""
        narrow = """
0.9 M parameters, milliseconds a step. Computing alone takes 50 ms in float32. Losses are those after 250 steps.

| preset | bytes | 100 Mbit/s, 50 ms | loss |
| :-- | --: | --: | --: |
| no codec | 100% |  |  |
| `"small"` | 15.0% | 80 | 2.2500 |
"""
        assert page.read_text() == PAGE.replace("old", whole).replace("narrow", narrow)
