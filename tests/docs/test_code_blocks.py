"""Code blocks of README.md and docs/: every one runs, and prints what the page shows.

Python blocks of a page share one namespace and are run in order; those that begin with ``>>>`` are doctests. In console
blocks, lines after ``$`` are commands; lines below a command are its output, where ``...`` stands for any text. A block
whose first line names a file, such as ``# train.py``, is written to that file; ``# train.py, changed`` is added below
the file's line that begins with ``model =``. A block that cannot run here has ``<!-- skip: next "reason" -->`` above
it. ``<!-- invisible-code-block: python`` hides code.
"""

import doctest
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

import codec

ROOT = Path(__file__).parents[2]
PAGES = {str(p.relative_to(ROOT)): p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
FLAGS = doctest.ELLIPSIS

# Languages of blocks that other tests run, by page.
RUN_ELSEWHERE = {
    "docs/guides/embedding.md": {"c", "cpp", "sh"},  # run by tests/native/test_embedding.py
    "docs/guides/gpu-c.md": {"c", "sh"},  # run by tests/engines/test_cuda_c.py
    "docs/guides/frameworks.md": {"python"},  # this page and the next three: run by tests/frameworks
    "docs/guides/arrays.md": {"python"},
    "docs/guides/zarr.md": {"python"},
    "docs/guides/federated-learning.md": {"python"},
}
_COMMAND = 'codec() { python -m codec "$@"; }; '  # shell function `codec` that runs the package under test
LONG = {"docs/tutorials/ddp.md"}  # pages whose blocks start training runs, which take long
NAMESPACES = ("codec-left", "codec-right")  # network namespaces that a page creates
_FILE = re.compile(r"# (\w+\.\w+)(, changed)?\n")
NOT_CODE = {"", "text", "toctree", "eval-rst", "tip", "note", "warning"}


def _evaluate_console(example: Example) -> None:
    """Run each command of a console block in the current folder, and compare its output with the block's."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(codec.__file__).parents[1]),  # commands import the same package as Python blocks
    }
    for step in re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)[1:]:
        command, _, expected = step.partition("\n")
        while command.endswith("\\"):
            line, _, expected = expected.partition("\n")
            command = f"{command[:-1]} {line.strip()}"
        done = subprocess.run(
            ["bash", "-c", _COMMAND + command],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        output = done.stdout
        if expected.strip():
            expected = re.sub(r"^\.\.\.\n", "...", expected, flags=re.MULTILINE)  # "..." stands for any number of lines
            assert doctest.OutputChecker().check_output(expected, output, FLAGS), f"$ {command}\n{output}"
        else:
            assert done.returncode == 0, f"$ {command}\n{output}"


def _write_file(text: str) -> None:
    """Write a block to the file that its first line names, or insert the block into that file."""
    named = _FILE.match(text)
    assert named, text
    path, body = Path(named[1]), text[named.end() :]
    if named[2]:
        body = re.sub(r"^(model =.*\n)", lambda line: line[1] + body, path.read_text(), flags=re.MULTILINE)
    path.write_text(body)


def _parsers(page: str) -> list:
    elsewhere = RUN_ELSEWHERE.get(page, set())
    parsers = [SkipParser()]
    if "sh" not in elsewhere:
        parsers.append(CodeBlockParser("sh", lambda example: _write_file(example.parsed)))
    if "python" not in elsewhere:
        parsers.append(PythonCodeBlockParser(doctest_optionflags=FLAGS))
    if "console" not in elsewhere:
        parsers.append(CodeBlockParser("console", _evaluate_console))
    return parsers


def _examples(page: str) -> list[Example]:
    return list(Document.parse(str(PAGES[page]), *_parsers(page)).examples())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run a test in a folder with links to examples/ and bench/, and destroy any process group afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    yield tmp_path
    for name in NAMESPACES:
        if Path("/run/netns", name).exists():
            subprocess.run(["ip", "netns", "del", name], check=True)
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _tier(page: str) -> list:
    return [pytest.mark.nightly] if page in LONG else []


@pytest.mark.parametrize("page", [pytest.param(page, marks=_tier(page)) for page in PAGES if _examples(page)])
def test_code_blocks_run_as_shown(page, folder):
    if page in LONG and os.geteuid():
        pytest.skip("makes network namespaces, which needs root")
    for example in _examples(page):
        if isinstance(example.parsed, str) and _FILE.match(example.parsed):
            _write_file(example.parsed)
            continue
        try:
            example.evaluate()
        except unittest.SkipTest:
            continue


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_says_why_not(page):
    """Each block either is text or has a language that a test runs."""
    languages = re.findall(
        r"^ *(?:```+|:::+)(?:\{([\w-]+)\}|(\w*)).*\n(?:.*\n)*?^ *(?:```+|:::+) *$",
        PAGES[page].read_text(),
        re.MULTILINE,
    )
    known = {"python", "console", "sh"} | NOT_CODE | RUN_ELSEWHERE.get(page, set())
    assert {a or b for a, b in languages} <= known
    skips = re.findall(r"<!--+ *skip: next(.*?)--+>", PAGES[page].read_text())
    assert all(re.fullmatch(r' "[^"]{10,}" *', reason) for reason in skips), skips
