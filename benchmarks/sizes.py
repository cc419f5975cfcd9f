"""How large is a package, and how tangled? Numbers from its source: lines, rooms, functions, circles.

    sizes_of(sources) -> numbers by name, and the sentences that name what is counted
    core_of(modules) -> the modules that are not optional

A *room* is a folder or a module directly below the package. An *arrow* leads from a room to another one that it
imports. A *floor* is one room in the longest chain of arrows. A *level* is one module in the longest chain of imports.
The package itself and its ``__main__`` are no rooms, and no short modules; nor is any ``__init__``. One without code,
which is a page about its folder, is no module. The code lines of a function include those of the functions in it, and
begin at its ``def``.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from benchmarks.imports import HIDDEN, Import, by_folder, circles, imports_of, levels, parsed, upward

MIN_LINES = 50
"""Code lines below which a module is short."""

MAX_FUNCTION_LINES = 50
"""Code lines that a function should not exceed, except an ``__init__`` and the functions of `APART`."""

APART = ("cli", "demo", "__main__")
"""Below the package: programs that use it."""

OPTIONAL = (
    "storage",
    "recordio",
    "vision",
    "leases",
    "text",
    "ray",
    "caching",
    "resident",
    "samplers",
    "mixing",
    "batchify",
    "instruments",
    "drop_in",
    "torch",
    "integrations",
    "parallel",
    "extend",
    *APART,
)
"""Below the package: what `ShardedDataLoader` does not need. The rest of the package is its core."""

FLOORS = (
    ("base",),
    ("randomness",),
    ("batching",),
    ("memory",),
    ("data",),
    ("engine",),
    ("sampling", "streams", "devices"),
    ("pools",),
    ("loader",),
    ("extend",),
    ("recordio", "parallel"),
    ("vision",),
    ("storage", "caching", "samplers", "mixing", "batchify", "ray", "resident"),
    ("text", "leases"),
    ("instruments",),
    ("drop_in",),
    ("torch",),
    ("integrations", *APART),
)
"""The lowest floor first. A module imports its own floor and the floors below."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """The number of lines that hold code: no blank lines, no comments, and no docstrings of any kind.

    Example:
        >>> code_lines('"Text."\\n\\nx = 1  # a comment\\n"About x."\\ny = (\\n    2\\n)\\n')
        4
    """
    return len(_numbers_of_code_lines(source))


def _numbers_of_code_lines(source: str) -> set[int]:
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines()
    return {number for number in numbers if lines[number - 1].strip()}


def core_of(modules: Iterable[str]) -> list[str]:
    """The modules of a package that are not `OPTIONAL`.

    Example:
        >>> core_of(["p", "p.torch", "p.pools", "p.ray.actor", "p.storage", "p.storages"])
        ['p', 'p.pools', 'p.storages']
    """
    return [name for name in modules if not _below(name, OPTIONAL)]


def _below(module: str, rooms: Iterable[str]) -> bool:
    return any(f"{module.partition('.')[2]}.".startswith(f"{room}.") for room in rooms)


def out_of_core(imports: Iterable[Import]) -> list[Import]:
    """The imports of an optional module by one of the core."""
    imports = list(imports)
    core = set(core_of({name for found in imports for name in (found.importer, found.imported)}))
    return [found for found in imports if found.importer in core and found.imported not in core]


def _functions(module: str, source: str, numbers: Collection[int]) -> Iterator[tuple[str, int]]:
    """The qualified name of each function, and its code lines.

    Args:
        module: dotted name.
        source: its source.
        numbers: of the lines that hold code.
    """

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}.{child.name}" if isinstance(child, (*_FUNCTIONS, ast.ClassDef)) else prefix
            if isinstance(child, _FUNCTIONS):
                yield name, sum(child.lineno <= number <= (child.end_lineno or 0) for number in numbers)
            yield from inside(child, name)

    return inside(parsed(source), module)


def _homonyms(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules of each class name, without its underscore, that stands for several classes."""
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for name in {node.name.lstrip("_") for node in ast.walk(parsed(source)) if isinstance(node, ast.ClassDef)}:
            homes.setdefault(name, []).append(module)
    return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}


def _rooms(sources: Mapping[str, str], imports: Sequence[Import]) -> tuple[list[str], list[Import]]:
    """The rooms and the arrows between them."""
    no_rooms = {next(iter(sources)).split(".")[0], *(name for name in sources if name.endswith(".__main__"))}
    folders, arrows = by_folder(sources, imports, depth=1)
    unique = {(arrow.importer, arrow.imported): arrow for arrow in arrows}
    return (
        [folder for folder in folders if folder not in no_rooms],
        [arrow for pair, arrow in unique.items() if not no_rooms.intersection(pair)],
    )


def sizes_of(sources: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """Measure a package.

    Args:
        sources: Sources by dotted module name, as from `read_sources`.

    Returns:
        The numbers by name, and one sentence for each circle, each long function, each class name with several
        meanings, and each upward or hidden import. Hidden imports count for circles, but not for floors and levels.
    """
    imports = imports_of(sources)
    seen = [found for found in imports if found.kind != HIDDEN]
    rings = {"modules": circles(sources, imports), "folders": circles(*by_folder(sources, imports))}
    unwanted = {
        "upward imports": upward(imports, FLOORS),
        "hidden imports": [found for found in imports if found.kind == HIDDEN],
    }
    rooms, arrows = _rooms(sources, seen)
    core = set(core_of(sources))
    inside = [found for found in seen if found.importer in core and found.imported in core]
    core_rooms, core_arrows = _rooms({module: sources[module] for module in core}, inside)
    numbers = {module: _numbers_of_code_lines(source) for module, source in sources.items()}
    lines = {module: len(found) for module, found in numbers.items()}
    folders = {name.rpartition(".")[0] for name in sources}
    functions = [
        function
        for module, source in sources.items()
        if not _below(module, APART)
        for function in _functions(module, source, numbers[module])
    ]
    long = {name: count for name, count in functions if count > MAX_FUNCTION_LINES and not name.endswith(".__init__")}
    homonyms = _homonyms(sources)
    sizes = {
        "code lines": sum(lines.values()),
        "code lines of the core": sum(lines[module] for module in core),
        "modules": sum(count > 0 for count in lines.values()),
        "modules of the core": sum(lines[module] > 0 for module in core),
        f"modules of less than {MIN_LINES} code lines": sum(
            count < MIN_LINES and module not in folders and not module.endswith("__main__")
            for module, count in lines.items()
        ),
        "rooms of the core": len(core_rooms),
        "arrows between rooms of the core": len(core_arrows),
        "floors of rooms": max(levels(rooms, arrows).values(), default=0),
        "levels of modules": max(levels(sources, seen).values()),
        **{f"circles of {what}": len(groups) for what, groups in rings.items()},
        **{what: len(some) for what, some in unwanted.items()},
        f"functions over {MAX_FUNCTION_LINES} code lines": len(long),
        "class names with several meanings": len(homonyms),
        "type: ignore": sum(len(re.findall("type: ignore", source)) for source in sources.values()),
    }
    notes = [f"circle of {what}: {', '.join(group)}" for what, groups in rings.items() for group in groups]
    for what, some in unwanted.items():
        kind = what.split()[0]
        notes += [f"{kind}: {found.importer}, line {found.line}, imports {found.imported}" for found in some]
    notes += [f"long: {name} has {count} code lines" for name, count in long.items()]
    notes += [f"several meanings: {name} in {', '.join(modules)}" for name, modules in homonyms.items()]
    return sizes, notes
