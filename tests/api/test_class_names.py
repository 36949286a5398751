"""A name says what it is: no two classes of the package have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

import codec


def test_class_names_occur_once():
    found = defaultdict(list)
    for path in Path(codec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.name}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
