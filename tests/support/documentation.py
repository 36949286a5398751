"""Read the code blocks of pages in docs/, so that tests can run them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(heading, page="docs/guides/frameworks.md"):
    """Return the Python code blocks in the section `heading` of a page of the repository, in order."""
    sections = re.split(r"^## ", (ROOT / page).read_text(), flags=re.MULTILINE)
    (section,) = [s for s in sections if s.partition("\n")[0] == heading]
    found = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no Python below {heading!r}"
    return found
