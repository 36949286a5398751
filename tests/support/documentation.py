"""Code blocks of docs/frameworks.md, which tests run."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/frameworks.md"


def blocks(heading):
    """Return the Python blocks below a heading of the page, in order."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (section,) = [s for s in sections if s.partition("\n")[0] == heading]
    found = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE} has no Python below {heading!r}"
    return found
