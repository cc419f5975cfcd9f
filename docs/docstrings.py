"""The library's signatures and docstrings, as mkdocstrings shows them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Shown(griffe.Extension):
    """What Griffe would not understand by itself."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Griffe knows a section as "Examples:"; "Example:" would become a box of running text."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_function(self, *, func: Any, **_: Any) -> None:
        """``**unknown: NoReturn`` is there to refuse what is no argument: it is none itself."""
        for parameter in [one for one in func.parameters if str(one.annotation) == "NoReturn"]:
            del func.parameters[parameter.name]
