"""What package indexes show: README.md, with links that work there. All other metadata is in setup.cfg.

README.md                       -> long_description
setup.cfg, project_urls: Source -> the address that relative links and pictures begin with

A package index shows the README without the files beside it. If ``Source`` is set, the index links to the files in the
repository. If it is not set, the index shows the text of those links, and the descriptions of the pictures.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from setuptools import setup

_PARTS = re.compile(
    r"""
      (?P<code> ^[ ]*(?P<fence>```+|~~~+).*?^[ ]*(?P=fence)[`~]*[ ]*$
              | (?P<ticks>(?<!`)`+(?!`))(?:(?!\n[ ]*\n).)+?(?<!`)(?P=ticks)(?!`) )
    | !\[(?P<alt>[^\[\]]*)\]   \((?P<picture>[^()\s]+)(?P<picture_title>\s+"[^"]*")?\)
    |  \[(?P<text>(?:`[^`]*`|!\[[^\[\]]*\]\([^()]*\)|[^\[\]`])*)\]
                               \((?P<target>[^()\s]+)(?P<title>\s+"[^"]*")?\)
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_NOT_A_FILE = re.compile(r"[a-z][a-z0-9+.-]*:|//|\#", re.IGNORECASE)


def long_description(readme: str, source: str | None) -> str:
    """The README as a package index shows it.

    Args:
        readme: Markdown, with links and pictures as ``[text](target)`` and ``![text](target)``. Code is not changed.
        source: Address of the repository, on a host whose addresses are like those of GitHub and GitLab. None: there
            is no public repository.

    Returns:
        The same text. Relative links and pictures lead into the repository. Without ``source`` they are plain text.
    """

    def absolute(kind: str, path: str) -> str:
        return f"{(source or '').rstrip('/')}/{kind}/HEAD/{path.removeprefix('./')}"

    def rewritten(part: re.Match[str]) -> str:
        if part["code"]:
            return part["code"]
        if part["picture"]:
            if _NOT_A_FILE.match(part["picture"]):
                return part[0]
            title = part["picture_title"] or ""
            return f"![{part['alt']}]({absolute('raw', part['picture'])}{title})" if source else part["alt"]
        text = _PARTS.sub(rewritten, part["text"])
        if _NOT_A_FILE.match(part["target"]):
            return f"[{text}]({part['target']}{part['title'] or ''})"
        return f"[{text}]({absolute('blob', part['target'])}{part['title'] or ''})" if source else text

    return _PARTS.sub(rewritten, readme)


def source_address(config: str) -> str | None:
    """The address that the text of setup.cfg gives for ``Source`` in ``project_urls``, if it gives one."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(config)
    for line in parser.get("metadata", "project_urls", fallback="").splitlines():
        name, _, address = map(str.strip, line.partition("="))
        if name == "Source":
            return address
    return None


if __name__ == "__main__":  # builders run this file, tests import it
    here = Path(__file__).parent
    setup(
        long_description=long_description(
            (here / "README.md").read_text(encoding="utf-8"),
            source_address((here / "setup.cfg").read_text(encoding="utf-8")),
        ),
        long_description_content_type="text/markdown",
    )
