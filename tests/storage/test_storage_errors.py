"""No message shows a password, a key or a signature."""

from __future__ import annotations

import pytest

from sharded_loader.storage.errors import redacted, shown


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/data/a b?.tar", "/data/a b?.tar"),
        ("s3://bucket/a.tar", "s3://bucket/a.tar"),
        ("https://me:pass@host:80/a.tar?sig=1&b=2#x", "https://host:80/a.tar"),
        ("ftp://token@host/a@b.tar", "ftp://host/a@b.tar"),
    ],
)
def test_a_url_is_shown_without_what_it_hides(url: str, expected: str) -> None:
    assert shown(url) == expected


def test_values_of_options_are_not_shown() -> None:
    options = {"key": "AKIA1234", "client": {"headers": [("Authorization", "Bearer abcdef")]}, "anon": False, "n": "ab"}
    text = "403 for AKIA1234 with Bearer abcdef at https://u:p@h/x?sig=9, see https://h/y?z (ab)"
    assert redacted(text, options) == "403 for *** with *** at https://h/x see https://h/y (ab)"
