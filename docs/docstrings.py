"""The library's signatures and docstrings, as mkdocstrings shows them.

    "Example:"                  -> a section of code
    `ShardDataset`, `refresh`   -> links to their entries in the reference
    **unknown: NoReturn         -> not shown
    size=_DEFAULT               -> the value of _DEFAULT
    "Args: Common"              -> a signature of these arguments alone

Griffe itself makes a group of arguments with a title of "Args: Order".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

REFERENCE = Path(__file__).with_name("reference")

_NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*)(\(\))?`(?!`)")


def documented() -> list[str]:
    """The names that have an entry in the reference."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md"))]
    return re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)


def linked(text: str, places: dict[str, str]) -> str:
    """The docstring with links at the names of ``places``. The lines of examples stay as they are."""

    def link(found: re.Match[str]) -> str:
        place = places.get(found[1])
        code = f"<code>{found[1]}{found[2] or ''}</code>"
        return found[0] if place is None else f'<autoref identifier="{place}" optional>{code}</autoref>'

    lines, example = [], False
    for line in text.splitlines():
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        lines.append(line if example else _NAME.sub(link, line))
    return "\n".join(lines)


def shorten(shown: Any) -> None:
    """Leave the arguments of the group "Common" in the signature of a class; its docstring keeps the types of all."""
    groups = [section for section in shown.docstring.parsed if section.kind is griffe.DocstringSectionKind.parameters]
    init = shown.members["__init__"]
    common = [init.parameters[argument.name] for argument in groups[0].value]
    others = griffe.Parameter("others", kind=griffe.ParameterKind.var_keyword)
    for given, parameter in zip(list(init.parameters)[1:], common, strict=False):
        if given is not parameter:  # another one comes before it, which is not shown
            parameter.kind = griffe.ParameterKind.keyword_only
    init.parameters = griffe.Parameters(*common, others)


class Shown(griffe.Extension):
    """What Griffe would not understand by itself."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Griffe knows a section as "Examples:"; "Example:" would become a box of running text. Griffe calls this after
        `on_package`: the docstring has its links."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            if obj.is_class and "\nArgs: Common\n" in obj.docstring.value:
                shorten(obj)

    def on_function(self, *, func: Any, **_: Any) -> None:
        """``**unknown: NoReturn`` is there to reject what is no argument: it is none itself. A private name as a
        default says nothing: its value does."""
        for parameter in list(func.parameters):
            if str(parameter.annotation) == "NoReturn":
                del func.parameters[parameter.name]
            elif str(parameter.default).startswith("_") and (named := func.module.members.get(str(parameter.default))):
                parameter.default = named.value

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Make links of names in single backticks: the names of the reference, and the members of the same class."""
        names = documented()
        public = {name.rpartition(".")[2]: name for name in names}
        done = set()
        for name in names:
            shown = pkg[name.partition(".")[2]]
            members = dict(shown.all_members) if shown.is_class else {}
            own = {member: f"{name}.{member}" for member in members}
            for one in [shown, *members.values()]:
                docstring = None if one.is_alias and not one.resolved else one.docstring
                if docstring is not None and id(docstring) not in done:
                    done.add(id(docstring))
                    docstring.value = linked(docstring.value, own | public)
