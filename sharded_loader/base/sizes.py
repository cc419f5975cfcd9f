"""Sizes in bytes, as users write them: 1000, "100 GB", "20 GiB".

What can go wrong: a ValueError that says what to write.
"""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def bytes_of_text(text: Any, least: int = 1, allowed: str = "a number of bytes above 0") -> int:
    """A number of bytes, from a number or a text.

    Args:
        text: as the user gave it.
        least: the smallest number that is allowed.
        allowed: what the user may give, for the message.

    Example:
        >>> bytes_of_text("1.5 GB"), bytes_of_text("2KiB"), bytes_of_text(7)
        (1500000000, 2048, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or isinstance(text, bool) or float(match[1]) * unit < least:
        raise ValueError(f"max_bytes is {text!r}: give {allowed}, or a text such as '100 GB' or '20 GiB'")
    return int(float(match[1]) * unit)
