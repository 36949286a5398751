"""Code blocks of pages in docs/, which tests run."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(heading, page="frameworks.md"):
    """Return the Python code blocks in the section `heading` of a page, in order."""
    sections = re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)
    (section,) = [s for s in sections if s.partition("\n")[0] == heading]
    found = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no Python below {heading!r}"
    return found
