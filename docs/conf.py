"""Configuration of the documentation site. ``make docs`` builds it; a test builds it with warnings as errors."""

from lightning_chakra import __version__

project = "lightning-chakra"
author = "lightning-chakra maintainers"
copyright = author  # noqa: A001  # the name that Sphinx reads
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
root_doc = "index"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
suppress_warnings = ["toc.empty_glob"]

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
