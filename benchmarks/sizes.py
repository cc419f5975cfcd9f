"""How large is a package, and how tangled? Numbers from its source: lines, levels, circles.

    sizes_of(sources) -> numbers by name, and a sentence for each circle, upward and hidden import

Two kinds of level are counted. A *level of modules* is one module in the longest chain of imports. A *level of folders*
is one folder (or module) directly below the package in the longest chain of imports between those.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping

from benchmarks.imports import HIDDEN, by_folder, circles, imports_of, levels, upward

MAX_LINES = 350
"""Lines of a file, all of them, that a module should not exceed."""

APART = ("cli", "demo", "__main__")
"""Below the package: programs that use it. Levels do not count them."""

FLOORS = (
    ("rng", "shuffle", "notices", "errors", "interrupts", "process_hooks"),
    ("batching",),
    ("memory",),
    ("sampling", "data", "recordio", "storage"),
    ("engine", "devices"),
    ("workers",),
    ("cluster",),
    ("pools",),
    ("loader", "iterator", "parallel", "drop_in", "torch", *APART),
)
"""The lowest floor first. A module imports its own floor and the floors below. Other modules are not checked."""

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """The number of lines that hold code: no blank lines, no comments, and no docstrings of any kind.

    Example:
        >>> code_lines('"Text."\\n\\nx = 1  # a comment\\n"About x."\\ny = (\\n    2\\n)\\n')
        4
    """
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines()
    return sum(bool(lines[number - 1].strip()) for number in found)


def sizes_of(sources: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """Measure a package.

    Args:
        sources: Sources by dotted module name, as from `read_sources`.

    Returns:
        The numbers by name, and one sentence for each circle, each upward import and each hidden import. Hidden imports
        count for circles, but not for levels.
    """
    imports = imports_of(sources)
    seen = [found for found in imports if found.kind != HIDDEN]
    inner = [name for name in sources if name.split(".")[1:2] not in [[program] for program in APART]]
    among = [found for found in seen if {found.importer, found.imported} <= set(inner)]
    rings = {"modules": circles(sources, imports), "folders": circles(*by_folder(sources, imports))}
    up, hidden = upward(imports, FLOORS), [found for found in imports if found.kind == HIDDEN]
    sizes = {
        "modules": len(sources),
        "code lines": sum(map(code_lines, sources.values())),
        f"modules over {MAX_LINES} lines": sum(len(text.splitlines()) > MAX_LINES for text in sources.values()),
        "levels of folders": max(levels(*by_folder(inner, among, depth=1)).values()),
        "levels of modules": max(levels(inner, among).values()),
        **{f"circles of {what}": len(groups) for what, groups in rings.items()},
        "upward imports": len(up),
        "hidden imports": len(hidden),
    }
    notes = [f"circle of {what}: {', '.join(group)}" for what, groups in rings.items() for group in groups]
    for what, some in (("upward", up), ("hidden", hidden)):
        notes += [f"{what}: {found.importer}, line {found.line}, imports {found.imported}" for found in some]
    return sizes, notes
