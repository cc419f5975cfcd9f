"""The recommendation of ``bench`` for made-up measurements."""

from __future__ import annotations

import pytest

from sharded_loader.cli.advice import recommend
from sharded_loader.cli.measure import Measurement

INLINE = Measurement("inline", 0, 1000.0, 64.0)


def rows(*speeds: tuple[str, int, float]) -> list[Measurement]:
    return [Measurement(pool, workers, speed, 64000 / speed) for pool, workers, speed in speeds]


@pytest.mark.parametrize(
    ("measured", "cores", "said"),
    [
        # Workers gain nothing.
        (rows(("process", 1, 900), ("process", 2, 1100)), 2, "Inline is enough, so leave out num_workers"),
        (rows(("process", 1, 900), ("process", 2, 1100)), 2, "with workers it is at best 1.10 times as fast"),
        # The fewest workers that are nearly as fast as the best ones.
        (rows(("process", 2, 1900), ("process", 4, 3800), ("process", 8, 4000)), 8, "Use num_workers=4: 3.8 times"),
        (rows(("process", 2, 1900), ("process", 4, 1950)), 8, "Use num_workers=2: 1.9 times"),
        # Nearly as fast as the best ones, but not worth it beside inline.
        (rows(("process", 1, 1150), ("process", 2, 1250)), 8, "Use num_workers=2: 1.2 times"),
        # The faster pool, and how to choose it.
        (rows(("process", 2, 1500), ("thread", 2, 1900)), 2, "Use num_workers=2, thread_pool=True: 1.9 times"),
        (rows(("process", 2, 1900), ("thread", 2, 1890)), 2, "Use num_workers=2: 1.9 times"),
        (rows(("ray", 2, 1900)), 2, 'Use num_workers=2, pool="ray": 1.9 times'),
        # Says when inline is enough all the same, or that more could be measured.
        (rows(("process", 2, 1900)), 2, "inline is enough if your training step takes far longer than 64 ms"),
        (rows(("process", 2, 1900)), 8, "more may be faster, so measure with --workers 2,4"),
    ],
)
def test_it_names_the_arguments_and_the_reason(measured: list[Measurement], cores: int, said: str) -> None:
    advice = recommend([INLINE, *measured], cores)
    assert said in advice
    assert advice.endswith(".") and "\n" not in advice


def test_inline_alone_is_compared_with_nothing() -> None:
    assert recommend([INLINE], 8) == (
        "Only inline was measured, 64 ms per batch: add --pools inline,thread,process to compare."
    )


def test_without_inline_the_best_row_is_named() -> None:
    assert recommend(rows(("process", 1, 900), ("process", 2, 1800)), 8).startswith("Use num_workers=2: ")


def test_rows_that_failed_do_not_count() -> None:
    failed = Measurement("thread", 8, error="boom")
    assert recommend([INLINE, failed, *rows(("process", 2, 1900))], 2).startswith("Use num_workers=2: ")
    assert recommend([failed], 2) == "Nothing could be measured: see the errors above."


def spread(pool: str, workers: int, lowest: float, median: float, highest: float) -> Measurement:
    return Measurement(pool, workers, median, 64000 / median, lowest=lowest, highest=highest)


def test_rounds_that_overlap_have_no_clear_winner() -> None:
    inline = spread("inline", 0, 600, 1000, 1500)
    advice = recommend([inline, spread("process", 2, 1300, 1900, 2000)], 2)
    assert advice.startswith("No clear winner: the rounds of num_workers=2 and inline overlap.")
    assert "--seconds" in advice
    assert recommend([inline, spread("process", 2, 1600, 1900, 2000)], 2).startswith("Use num_workers=2: ")


def test_rows_that_are_alike_need_no_winner() -> None:
    two, four = spread("process", 2, 1800, 1900, 2000), spread("process", 4, 1850, 1950, 2050)
    assert recommend([INLINE, two, four], 8).startswith("Use num_workers=2: ")
    slower = spread("thread", 2, 990, 1010, 1200)
    assert recommend([INLINE, slower], 2).startswith("Inline is enough")
