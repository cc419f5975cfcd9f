"""The public names and their signatures, as the last release had them and as they changed since.

    python -m tests.signatures --write     writes tests/golden/signatures.json

Public is what the pages in docs/reference/ show, with members as their options say. Of ``sharded_loader.extend``, which
docs/versions.md promises less of, only names are listed.

The file has a layer for each heading of CHANGELOG.md under which signatures have changed: name -> signature; None: the
name is gone. The first layer is what was there before. The section of a heading must have each name of its layer in
backquotes.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests/golden/signatures.json"
PACKAGE = "sharded_loader"
MAKERS = {"__init__", "__new__", "__call__"}
Layer = dict[str, str | None]


def shown() -> dict[str, list[str]]:
    """Each name in the reference, with those of its members that it shows."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/reference").glob("*.md")))
    found = {}
    for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", f"{pages}\n", re.MULTILINE):
        chosen = re.search(r" members: (?:false|\[(.*)\])", options)
        usual = members(resolve_name(name), "inherited_members: true" in options)
        found[name] = [one for one in (chosen[1] or "").split(", ") if one] if chosen else usual
    return found


def members(one: object, inherited: bool) -> list[str]:
    """The public attributes of a class, apart from those that another library has given it."""
    bases = inspect.getmro(one) if inspect.isclass(one) else ()
    ours = [base for base in bases if base.__module__.startswith(PACKAGE)]
    return sorted({name for base in (ours if inherited else ours[:1]) for name in vars(base) if name[0] != "_"})


def signatures() -> dict[str, str]:
    """Name -> signature, of functions, classes (how one is made), methods and properties."""
    shelf = dict.fromkeys((f"{PACKAGE}.extend.{name}" for name in resolve_name(f"{PACKAGE}.extend").__all__), "")
    return shelf | {name: text for top, chosen in shown().items() for name, text in signatures_of(top, chosen)}


def signatures_of(name: str, chosen: list[str]) -> Iterator[tuple[str, str]]:
    one = resolve_name(name)
    makers = [base for base in inspect.getmro(one if inspect.isclass(one) else type(one)) if MAKERS & vars(base).keys()]
    is_own = inspect.isfunction(one) or makers[0].__module__.startswith(PACKAGE)  # not as another library's base
    yield name, signature_of(one) if is_own else ""
    for member in chosen:
        found = inspect.getattr_static(one, member, None)
        function = getattr(found, "fget", None) or getattr(found, "func", None)
        if function is not None:
            yield f"{name}.{member}", f"property{signature_of(function, ())}"
        elif found is None:  # set by the constructor
            yield f"{name}.{member}", ""
        elif str(getattr(getattr(one, member), "__module__", "")).startswith(PACKAGE):
            yield f"{name}.{member}", signature_of(getattr(one, member))


def signature_of(call: Callable[..., Any], parameters: Iterable[inspect.Parameter] | None = None) -> str:
    """The signature as its source has it, without what depends on the process and the version of Python."""
    found = inspect.signature(call)
    named = [one for one in found.parameters.values() if one.annotation not in (NoReturn, "NoReturn")]
    text = str(found.replace(parameters=named if parameters is None else parameters))
    return re.sub(r"ForwardRef\((.*?)\)", r"\1", re.sub(r" at 0x\w+", "", text))


def sections() -> dict[str, str]:
    """The sections of CHANGELOG.md by their headings, the newest first."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## \[(.+?)\][^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def merged(layers: dict[str, Layer]) -> Layer:
    return {name: text for layer in layers.values() for name, text in layer.items()}


def changes(before: Layer, now: dict[str, str]) -> Layer:
    return {name: now.get(name) for name in sorted({*before, *now}) if now.get(name) != before.get(name)}


def unnamed(layer: Layer, section: str) -> list[str]:
    """The names of a layer that no backquotes in a section of CHANGELOG.md have."""
    words = {word for span in re.findall(r"`([^`]+)`", section) for word in re.findall(r"\w+", span)}
    return [name for name in layer if name.rpartition(".")[2] not in words]


def main() -> None:
    top, *older = sections()
    layers = json.loads(FILE.read_text(encoding="utf-8"))
    kept = {at: layer for number, (at, layer) in enumerate(layers.items()) if not number or at in older}
    new = changes(merged(kept), signatures())
    for name in unnamed(new, sections()[top]):
        print(f"add a line with `{name.rpartition('.')[2]}` under the heading [{top}] of CHANGELOG.md: {name}")
    FILE.write_text(json.dumps(kept | ({top: new} if new else {}), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    main()
