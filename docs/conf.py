"""Configuration of the documentation site. ``make docs`` builds it; a test builds it with warnings as errors."""

from pathlib import Path

from sphinx.application import Sphinx

from lightning_chakra import __version__

project = "lightning-chakra"
author = "lightning-chakra maintainers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_*"]
root_doc = "index"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

nitpicky = True
# The build needs no network, so it cannot look up what other projects document.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|lightning|pl|os|argparse)\..*"),
    ("py:class", r"(optional|Kind|Literal\[.*\]|Path.*|list\[.*)"),
]

html_theme = "furo"
html_title = f"lightning-chakra {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"


def _list_pages_in_depth(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fill the table of contents with those of the pages that are there."""
    pages = ("large_jobs", "cost", "reliability", "tools", "compatibility")
    there = [page for page in pages if Path(app.srcdir, f"{page}.md").exists()]
    source[0] = source[0].replace("PAGES_IN_DEPTH", "\n".join(there))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _list_pages_in_depth)
