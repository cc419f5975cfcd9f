"""Looks at every page of the built site in a real browser, and lists what is wrong.

    python -m tests.docs.render                       looks at site/, which `make docs` builds
    python -m tests.docs.render --screenshots DIR     also keeps a picture of every page

    pages x (1,300 and 400 px) x (light, dark)  --Chromium-->  faults: page, width, scheme, what is wrong

The site is served on this machine, and Chromium resolves no other name. One browser renders a few pages at a time.
The script needs Playwright, and Chromium: the one that `CHROMIUM` names, one on the PATH, or Playwright's own.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import functools
import importlib.util
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1300, 400)
HEIGHT = 900
SCHEMES = ("light", "dark")
AT_ONCE = 4  # pages that are open side by side

FLAGS = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
FLAGS += ["disable-component-update", "disable-sync", "hide-scrollbars"]
FLAGS = [f"--{flag}" for flag in [*FLAGS, "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]]
LOOK = Path(__file__).with_name("look.js").read_text(encoding="utf-8")


class Fault(NamedTuple):
    """What is wrong with a page, at a width and in a scheme; "any" stands for all of them."""

    page: str
    width: int | str
    scheme: str
    what: str

    def __str__(self) -> str:
        return f"{self.page}  {self.width}  {self.scheme}  {self.what}"


# -- what it needs ------------------------------------------------------------------------------------------


def chromium() -> str | None:
    """The browser: its path, "" for Playwright's own, None if there is none."""
    named = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    found = next((path for name in named if name and (path := shutil.which(name))), None)
    if found is None and importlib.util.find_spec("playwright"):
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            return "" if Path(playwright.chromium.executable_path).exists() else None
    return found


def missing() -> str | None:
    """Why no page can be rendered here; None if all is there."""
    if importlib.util.find_spec("playwright") is None:
        return "needs the package playwright"
    return "needs Chromium: install it, or name it in CHROMIUM" if chromium() is None else None


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """The list of faults is the output."""


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of the folder while it is served on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@contextlib.asynccontextmanager
async def browser() -> Any:
    """Chromium, with a profile of its own."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(
            executable_path=chromium() or None, args=[f"--{flag}" for flag in FLAGS]
        )
        try:
            yield running
        finally:
            await running.close()


# -- looking ------------------------------------------------------------------------------------------------


class Looks:
    """The faults of a site, and what the pages link to."""

    def __init__(self, site: Path, address: str, screenshots: Path | None) -> None:
        self.site, self.address, self.screenshots = site, address, screenshots
        self.pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
        self.faults: list[Fault] = []
        self.ids: dict[str, set[str]] = {}
        self.links: dict[str, set[str]] = {}

    async def look(self, context: Any, page: str, scheme: str) -> None:
        """One page, in one scheme: in a wide window, which then becomes narrow."""
        told: list[str] = []
        tab = await context.new_page()
        tab.on("console", lambda said: said.type == "error" and told.append(f"console error: {said.text}"))
        tab.on("pageerror", lambda error: told.append(f"error in a script: {error}"))
        tab.on("request", lambda request: self._check_request(request.url, told))
        tab.on("response", lambda got: got.status >= 400 and told.append(f"is not there ({got.status}): {got.url}"))
        await tab.add_init_script(f"{LOOK}\nwatchCopies()")
        await tab.goto(self.address + page)
        for width in WIDTHS:
            await tab.set_viewport_size({"width": width, "height": HEIGHT})
            await tab.wait_for_function("document.fonts.status == 'loaded'")
            if self.screenshots is not None:
                name = page.removesuffix(".html").replace("/", "-")
                await tab.screenshot(path=self.screenshots / f"{name}-{width}-{scheme}.png", full_page=True)
            seen = await tab.evaluate("narrow => look(narrow)", width < 800)
            self._tell(page, width, scheme, seen["faults"])
            if (width, scheme) == (WIDTHS[0], SCHEMES[0]):
                self.ids[page], self.links[page] = set(seen["ids"]), set(seen["links"])
                self._tell(page, width, scheme, await self._copies(tab))
        # What is loaded does not depend on the width.
        for width in WIDTHS:
            self._tell(page, width, scheme, told)
        await tab.close()

    def _tell(self, page: str, width: int, scheme: str, what: list[str]) -> None:
        self.faults += [Fault(page, width, scheme, one) for one in dict.fromkeys(what)]

    def _check_request(self, url: str, told: list[str]) -> None:
        if urlsplit(url).scheme not in ("data", "blob") and not url.startswith(self.address):
            told.append(f"asks the network for {url}")

    @staticmethod
    async def _copies(tab: Any) -> list[str]:
        # Buttons appear where code comes into view: make all of it visible.
        height = await tab.evaluate("document.documentElement.scrollHeight")
        await tab.set_viewport_size({"width": WIDTHS[0], "height": min(height + 200, 30_000)})
        await tab.wait_for_timeout(100)
        return [
            f"the copy button copies what does not run: {why}"
            for copy in await tab.evaluate("pressCopyButtons()")
            if (why := wrong_copy(copy["language"], copy["text"]))
        ]

    def dead_links(self) -> Iterator[Fault]:
        """Links within the site to a page, a file or a heading that is not there."""
        for page, links in sorted(self.links.items()):
            for link in sorted(links):
                if not link.startswith(self.address):
                    continue
                target = unquote(urlsplit(link).path).lstrip("/")
                target = f"{target}index.html" if target.endswith("/") or not target else target
                anchor = unquote(urlsplit(link).fragment)
                if not (self.site / target).is_file():
                    yield Fault(page, "any", "any", f"dead link: {target}")
                elif anchor and target in self.ids and anchor not in self.ids[target]:
                    yield Fault(page, "any", "any", f"dead anchor: {target}#{anchor}")


def wrong_copy(language: str, text: str | None) -> str | None:
    """What keeps a copied text from running; None if it runs."""
    if text is None:
        return "nothing was copied"
    if language in ("python", "pycon", "py", "ipython3") and not re.search(r"^\s*[%!]", text, re.MULTILINE):
        try:
            ast.parse(textwrap.dedent(text))
        except SyntaxError as error:
            return f"{error.msg}: {(error.text or text).strip()!r}"
    elif found := re.search(r"^ *(?:>>>|\$|In \[\d*\]:)(?: .*)?$", text, re.MULTILINE):
        return repr(found[0])
    elif text.rstrip("\n").endswith("\\"):
        return "the last line ends with a backslash, and the line after it is missing"
    return None


async def _render(site: Path, screenshots: Path | None) -> list[Fault]:
    with served(site) as address:
        looks = Looks(site, address, screenshots)
        async with browser() as running:
            for scheme in SCHEMES:
                size = {"width": WIDTHS[0], "height": HEIGHT}
                context = await running.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
                waiting = iter(looks.pages)

                async def work(context: Any = context, waiting: Any = waiting, scheme: str = scheme) -> None:
                    for page in waiting:
                        await looks.look(context, page, scheme)

                await asyncio.gather(*(work() for _ in range(AT_ONCE)))
                await context.close()
        return [*looks.dead_links(), *looks.faults]


def summed_up(faults: list[Fault]) -> list[Fault]:
    """Each fault of a page once: what it has at each width, or in each scheme, is said of "any"."""
    found: dict[tuple[str, str], set[tuple[Any, str]]] = {}
    for fault in faults:
        found.setdefault((fault.page, fault.what), set()).add((fault.width, fault.scheme))
    lines = []
    for (page, what), places in found.items():
        widths, schemes = {width for width, _ in places}, {scheme for _, scheme in places}
        if len(places) == len(WIDTHS) * len(SCHEMES):
            places = {("any", "any")}
        elif len(places) == len(SCHEMES) and len(widths) == 1:
            places = {(*widths, "any")}
        elif len(places) == len(WIDTHS) and len(schemes) == 1:
            places = {("any", *schemes)}
        lines += [Fault(page, width, scheme, what) for width, scheme in sorted(places, key=str)]
    return sorted(lines, key=lambda fault: (fault.page, fault.what, str(fault.width), fault.scheme))


def render(site: Path, screenshots: Path | None = None) -> list[Fault]:
    """The faults of every page of a built site; a folder gets a picture of each."""
    if screenshots is not None:
        screenshots.mkdir(parents=True, exist_ok=True)
    return summed_up(asyncio.run(_render(site, screenshots)))


def main() -> int:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(description="Render every page of the site, and list what is wrong.")
    parser.add_argument("site", nargs="?", type=Path, default=ROOT / "site", help="the built site (default: site/)")
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="keep a picture of every page in DIR")
    given = parser.parse_args()
    if why := missing():
        parser.error(why)
    if not (given.site / "index.html").is_file():
        parser.error(f"{given.site} has no index.html: run `make docs` first")
    faults = render(given.site, given.screenshots)
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults in {len(list(given.site.rglob('*.html')))} pages", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
