"""Sphinx configuration."""

from __future__ import annotations

from importlib.metadata import version as _version

project = "HAPI on Swift"
copyright = "the HAPI on Swift contributors"
release = version = _version("swift-hapi")

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {"top_of_page_buttons": []}
nitpicky = False
autodoc_member_order = "bysource"
maximum_signature_line_length = 70
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
