"""The page of the tutorials shows a card for each notebook."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))


@pytest.fixture(scope="module")
def cards() -> Any:
    """docs/cards.py, which no package holds."""
    spec = importlib.util.spec_from_file_location("cards", ROOT / "docs" / "cards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


def test_every_notebook_is_on_the_page_in_its_order(cards: Any) -> None:
    text = cards.on_page_markdown((ROOT / "docs" / cards.PAGE).read_text(encoding="utf-8"), page(cards.PAGE))
    places = [text.find(f"]({path.relative_to(ROOT).as_posix()})") for path in NOTEBOOKS]
    assert len(places) > 9
    assert -1 not in places
    assert places == sorted(places)
    assert cards.MARK not in text


def test_a_card_says_what_how_long_and_shows_a_picture(cards: Any) -> None:
    for card in cards.cards():
        assert card.title in card.markdown()
        assert card.promise in card.markdown()
        assert f"{card.minutes} minutes" in card.markdown()
        assert Image.open(io.BytesIO(card.picture)).width > 200


def test_a_notebook_without_a_picture_is_an_error(cards: Any, tmp_path: Path) -> None:
    opening = "# Title\n\nAfter this notebook you can do it.\n\nIt takes about 3 minutes to read."
    path = tmp_path / "01_plain.ipynb"
    path.write_text(json.dumps({"cells": [{"source": [opening]}]}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"01_plain\.ipynb.*picture"):
        cards.card(path)
