"""This project's docstrings, as mkdocstrings reads them: "Example:" with its doctest is a section of examples."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Griffe knows the section as "Examples:"; what it does not know becomes a box of running text."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called for each object whose docstring may be shown."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
