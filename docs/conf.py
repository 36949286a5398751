"""Sphinx configuration of the documentation; ``make docs`` builds it into build/docs/html.

The C and C++ reference is read by Breathe from Doxygen's XML, which ``make docs`` writes before.
"""

import re
from pathlib import Path
from typing import Any

import codec

ROOT = Path(__file__).parents[1]

project = "codec"
author = "the authors of codec"
copyright = author
version = release = codec.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "breathe",
    "sphinx_copybutton",
]
templates_path = ["_templates"]
exclude_patterns = ["Doxyfile"]
highlight_language = "text"
html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's own style underlines names of modules as if they were links
html_title = f"codec {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # copied commands have neither prompts nor output
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

autosummary_generate = True
autosummary_imported_members = True  # public objects are imported into the modules that export them
autosummary_ignore_module_all = False
autodoc_typehints = "none"  # docstrings give types
# Frameworks of codec.integrations, which need not be installed
autodoc_mock_imports = [
    *("accelerate", "flwr", "lightning", "lmcache", "numcodecs", "nvflare", "sglang", "torchft", "transformers", "trl"),
    *("verl", "vllm", "zarr"),
]
autodoc_preserve_defaults = True  # signatures show defaults as they are written
autodoc_default_options = {"member-order": "bysource"}
numpydoc_show_class_members = False
suppress_warnings = ["ref.citation"]  # docstrings list sources that their text need not cite

breathe_projects = {"codec": str(ROOT / "build/docs/xml"), "gloo": str(ROOT / "build/docs/gloo/xml")}
breathe_default_project = "codec"
breathe_domain_by_file_pattern = {"*/codec.h": "c", "*/codec_engine.h": "c", "*/codec_cuda.h": "c"}  # others: C++
breathe_order_parameters_first = False


def _link_sources(app: Any, docname: str, source: list[str]) -> None:
    """Make links to files outside docs/ downloads, those to folders paths, and check that they exist."""
    folder = (ROOT / "docs" / docname).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match.group()
        if not path.exists():
            raise FileNotFoundError(f"docs/{docname}.md links to {target}, which does not exist")
        if path.is_file():
            return f"{{download}}`{text.replace('`', '')} <{target}>`"
        name = path.relative_to(ROOT)
        return f"`{name}`" if text.strip("`") in (str(name), name.name) else f"{text} (`{name}`)"

    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)#\s]+)\)", replaced, source[0])


def setup(app: Any) -> None:
    """Register the handlers of this file with Sphinx."""
    app.connect("source-read", _link_sources)
