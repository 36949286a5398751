"""Table of frame sizes in bytes, by gradient in bench/data and by spec: `tests/format/sizes.csv`.

``PYTHONPATH=tests python -m support.frame_sizes`` rewrites the table.
"""

import csv
from pathlib import Path

import numpy as np

import codec
from support.specs import LOSSLESS, LOSSY, MORE, TOPKS, TRUNCATES

ROOT = Path(__file__).parents[2]
DATA = ROOT / "bench/data"
TABLE = ROOT / "tests/format/sizes.csv"
SPECS = LOSSLESS | LOSSY | TOPKS | TRUNCATES | MORE


def gradients() -> dict[str, np.ndarray | codec.View]:
    """Return the gradient of each file in bench/data, by its name."""
    found = {}
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path) as file:
            found[path.stem] = file["grad"] if "grad" in file else codec.view(file["grad_bits"], "bfloat16")
    return found


def measured() -> list[list[str]]:
    """Measure the rows of the table: gradient, spec, frame size in bytes. Truncate has a fixed level here."""
    rows = [["gradient", "spec", "frame_nbytes"]]
    for gradient, x in gradients().items():
        for name, spec in SPECS.items():
            if isinstance(spec, codec.Truncate) and spec.fixed_level is None:
                continue
            rows.append([gradient, name, str(len(codec.encode(x, spec)))])
    return rows


def committed() -> list[list[str]]:
    """Return the rows of tests/format/sizes.csv."""
    with TABLE.open(newline="") as file:
        return list(csv.reader(file))


if __name__ == "__main__":
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(measured())
