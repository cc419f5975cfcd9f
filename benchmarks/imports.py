"""Which module of a package imports which, read from the source. Nothing is executed.

    read_sources(folder) -> {module: source}
    imports_of({module: source}) -> Imports         one for each pair of modules of the package and each kind
    levels(modules, imports) -> {module: level}     1: imports no module of the package
    circles(modules, imports) -> groups of modules that import each other
    by_folder(modules, imports) -> (folders, Imports between folders)
    upward(imports, floors) -> Imports from a lower floor to a higher one

An import under ``if TYPE_CHECKING`` does not count, because it never runs. ``import p.folder.module`` also runs
``p/folder/__init__.py``: this does not count, or each ``__init__`` that imports from its own folder would be a circle.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TOP = "top"
FUNCTION = "function"
HIDDEN = "hidden"


@dataclass(frozen=True, order=True)
class Import:
    """One module of a package uses another one.

    Attributes:
        importer: dotted name of the module that imports.
        imported: dotted name of the module that is imported.
        kind: ``"top"`` (runs when the importer is imported), ``"function"`` (runs when a function is called, also
            ``importlib.import_module("...")``) or ``"hidden"`` (``sys.modules["..."]`` or ``sys.modules.get("...")``).
        line: the first line of the importer that does it, counted from 1.
    """

    importer: str
    imported: str
    kind: str
    line: int


def read_sources(folder: Path) -> dict[str, str]:
    """The source of each module of a package.

    Args:
        folder: The folder of the package. Its name is the name of the package.

    Returns:
        Sources by dotted module name, sorted by name. An ``__init__.py`` has the name of its folder.

    Raises:
        FileNotFoundError: ``folder`` holds no ``__init__.py``.
    """
    if not (folder / "__init__.py").is_file():
        raise FileNotFoundError(f"{folder} holds no __init__.py; pass the folder of a package")
    sources = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return dict(sorted(sources.items()))


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a source. Nobody changes it."""
    return ast.parse(source)


def imports_of(sources: Mapping[str, str]) -> list[Import]:
    """The imports between the modules of a package.

    ``from package import name`` is an import of ``package.name`` if that is a module, otherwise of ``package``.

    Args:
        sources: Sources by dotted module name, as from `read_sources`.

    Returns:
        The imports, sorted. Imports of modules that are not in ``sources`` are left out.

    Example:
        >>> sources = {"p": "", "p.a": "from p import b", "p.b": "def f():\\n    from p.a import x"}
        >>> for found in imports_of(sources): print(found.importer, found.imported, found.kind, found.line)
        p.a p.b top 1
        p.b p.a function 2
    """
    first: dict[tuple[str, str, str], int] = {}
    for importer, source in sources.items():
        is_folder = any(name.startswith(f"{importer}.") for name in sources)
        package = importer if is_folder else importer.rpartition(".")[0]
        for node, inside in _running(parsed(source), False):
            for imported, kind in _named(node, inside, package, sources):
                if imported != importer:
                    first.setdefault((importer, imported, kind), node.lineno)
    return sorted(Import(*key, line) for key, line in first.items())


def _running(node: ast.AST, inside: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    """All statements and expressions that can run, and whether they are inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _last_name(child.test) == "TYPE_CHECKING":
            child = ast.Module(child.orelse, [])
        if isinstance(child, (ast.stmt, ast.expr)):
            yield child, inside
        yield from _running(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def _named(node: ast.AST, inside: bool, package: str, modules: Collection[str]) -> Iterator[tuple[str, str]]:
    """The modules of the package that this node imports, and the kind of import."""
    kind = FUNCTION if inside else TOP
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
        full = [f"{base}.{alias.name}" for alias in node.names]
        names = [name if name in modules else base for name in full]
    elif isinstance(node, ast.Call) and node.args:
        names = _constant(node.args[0])
        called = ast.unparse(node.func) if names else ""
        if called in ("sys.modules.get", "modules.get"):
            kind = HIDDEN
        elif called not in ("importlib.import_module", "import_module", "__import__"):
            return
    elif isinstance(node, ast.Subscript) and _constant(node.slice):
        by_name = ast.unparse(node.value) in ("sys.modules", "modules")
        names, kind = _constant(node.slice) if by_name else [], HIDDEN
    yield from ((name, kind) for name in dict.fromkeys(names) if name in modules)


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _constant(node: ast.AST) -> list[str]:
    return [str(node.value)] if isinstance(node, ast.Constant) else []


def circles(modules: Iterable[str], imports: Iterable[Import]) -> list[list[str]]:
    """Groups of modules of which each one imports all others, directly or through the rest.

    Args:
        modules: Dotted names.
        imports: Imports between them; imports of other modules are ignored.

    Returns:
        The groups of two modules or more, sorted. An empty list: there is no import circle.

    Example:
        >>> circles("abc", [Import("a", "b", "top", 1), Import("b", "a", "function", 9), Import("b", "c", "top", 1)])
        [['a', 'b']]
    """
    reached = _reached(modules, imports)
    inside = [name for name in reached if name in reached[name]]
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in inside}
    return sorted(map(list, groups))


def levels(modules: Iterable[str], imports: Iterable[Import]) -> dict[str, int]:
    """The level of each module: the number of modules in the longest chain of imports that begins there.

    Args:
        modules: Dotted names.
        imports: Imports between them; imports of other modules are ignored. A circle counts as one module.

    Returns:
        Levels by name, at least 1.

    Example:
        >>> levels("abc", [Import("a", "b", "top", 1), Import("b", "c", "top", 1)])
        {'a': 3, 'b': 2, 'c': 1}
    """
    reached = _reached(modules, imports)
    found: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in found:
            below = [level(other) for other in reached[name] if name not in reached[other]]
            found[name] = 1 + max(below, default=0)
        return found[name]

    return {name: level(name) for name in reached}


def _reached(modules: Iterable[str], imports: Iterable[Import]) -> dict[str, set[str]]:
    """The modules that each module imports, directly or not. A module reaches itself if it is in a circle."""
    direct: dict[str, set[str]] = {name: set() for name in modules}
    for found in imports:
        if {found.importer, found.imported} <= direct.keys():
            direct[found.importer].add(found.imported)
    reached = {}
    for name in direct:
        seen: set[str] = set()
        todo = list(direct[name])
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += direct[other]
        reached[name] = seen
    return reached


def by_folder(modules: Collection[str], imports: Iterable[Import], depth: int = 99) -> tuple[list[str], list[Import]]:
    """The imports between folders: `levels` and `circles` take them like imports between modules.

    Args:
        modules: Dotted names of all modules of the package.
        imports: As from `imports_of`.
        depth: How many folders below the package are told apart: with 1, ``p.engine.pools.base`` belongs to
            ``p.engine``, by default to ``p.engine.pools``.

    Returns:
        The folders, sorted, and the imports from one to another. A module directly below the package, and the package's
        ``__init__``, count as a folder.

    Example:
        >>> modules = ["p", "p.loader", "p.memory", "p.memory.codec", "p.memory.arena"]
        >>> by_folder(modules, [Import("p.loader", "p.memory.codec", "top", 3)])
        (['p', 'p.loader', 'p.memory'], [Import(importer='p.loader', imported='p.memory', kind='top', line=3)])
    """
    folders = {name.rpartition(".")[0] for name in modules}

    def folder(module: str) -> str:
        parts = module.split(".")
        own = parts if module in folders or len(parts) == 2 else parts[:-1]
        return ".".join(own[: depth + 1])

    pairs = [replace(found, importer=folder(found.importer), imported=folder(found.imported)) for found in imports]
    return sorted({folder(name) for name in modules}), sorted(
        {pair for pair in pairs if pair.importer != pair.imported}
    )


def upward(imports: Iterable[Import], floors: Sequence[Collection[str]]) -> list[Import]:
    """The imports from a lower floor to a higher one.

    Args:
        imports: As from `imports_of`.
        floors: The lowest floor first. A floor is a collection of names below the package: folders (``"memory"``) or
            single modules (``"loader"``). Modules on no floor are ignored; modules on one floor may import each other.

    Example:
        >>> up = Import("p.memory.codec", "p.loader", "function", 7)
        >>> down = Import("p.loader", "p.memory.codec", "top", 7)
        >>> upward([up, down], [["memory"], ["loader"]]) == [up]
        True
    """
    floor_of = {name: number for number, names in enumerate(floors) for name in names}

    def floor(module: str) -> int:
        return floor_of.get(module.split(".")[1], -1) if "." in module else -1

    pairs = [(found, floor(found.importer), floor(found.imported)) for found in imports]
    return [found for found, low, high in pairs if low >= 0 and low < high]
