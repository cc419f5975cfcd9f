"""Which row of a measurement to use: pure functions, tested on made-up measurements.

recommend(measurements, cores) -> one sentence
"""

from __future__ import annotations

from collections.abc import Sequence

from sharded_loader.cli.measure import Measurement

WORTH = 1.2
"""Workers are worth their memory if they read this many times as fast as the main process."""

NEARLY = 0.9
"""A row with fewer workers is preferred if it has this share of the highest speed."""

_ARGUMENTS = {"process": "", "thread": ", thread_pool=True", "ray": ', pool="ray"'}


def recommend(measurements: Sequence[Measurement], cores: int) -> str:
    """Which arguments to give to the loader, in one sentence.

    Args:
        measurements: rows that failed are ignored.
        cores: how many cores workers can share.

    Returns:
        The sentence. It names no arguments if the rounds of two rows overlap that lead to other arguments.

    Example:
        >>> recommend([Measurement("inline", 0, 1000, 64.0), Measurement("process", 2, 1100, 58.2)], cores=2)
        'Inline is enough, so leave out num_workers: with workers it is at best 1.10 times as fast.'
    """
    good = [one for one in measurements if one.error is None]
    if not good:
        return "Nothing could be measured: see the errors above."
    inline = next((one for one in good if one.pool == "inline"), None)
    if inline is not None and len(good) == 1:
        return f"Only inline was measured, {_ms(inline)} per batch: add --pools inline,thread,process to compare."
    chosen = _chosen(good, inline)
    if unclear := [one for one in good if one is not chosen and _may_be_the_better(one, chosen)]:
        names = " and ".join(_arguments(one) for one in (chosen, unclear[0]))
        return (
            f"No clear winner: the rounds of {names} overlap. "
            "Stop other programs and measure again, or measure for longer, such as --seconds 20."
        )
    if chosen is inline:
        times = max(one.samples_per_second for one in good if one is not inline) / inline.samples_per_second
        return f"Inline is enough, so leave out num_workers: with workers it is at best {times:.2f} times as fast."
    arguments = _arguments(chosen)
    if inline is None:
        return f"Use {arguments}: no other row that was measured is much faster or needs fewer workers."
    ratio = chosen.samples_per_second / inline.samples_per_second
    most = max(one.workers for one in good if one.pool == chosen.pool)
    if chosen.workers == most and most < cores:
        then = f"more may be faster, so measure with --workers {most},{2 * most}."
    else:
        then = f"inline is enough if your training step takes far longer than {_ms(inline)}."
    return f"Use {arguments}: {ratio:.1f} times as fast as inline; {then}"


def _chosen(good: Sequence[Measurement], inline: Measurement | None) -> Measurement:
    """Inline if no row is much faster; otherwise the row with the fewest workers among the fastest."""
    best = max(good, key=lambda one: one.samples_per_second)
    if inline is not None and best.samples_per_second < WORTH * inline.samples_per_second:
        return inline
    least = max(NEARLY * best.samples_per_second, WORTH * inline.samples_per_second if inline else 0.0)
    near = [one for one in good if one.samples_per_second >= least]
    return min(near, key=lambda one: (one.workers, -one.samples_per_second))


def _may_be_the_better(other: Measurement, chosen: Measurement) -> bool:
    """Whether the medians differ enough to matter, and the rounds too much to tell which row is faster."""
    low, high = sorted([other, chosen], key=lambda one: one.samples_per_second)
    matters = high.samples_per_second >= WORTH * low.samples_per_second
    return matters and low.range[1] > high.range[0]


def _arguments(one: Measurement) -> str:
    return "inline" if one.pool == "inline" else f"num_workers={one.workers}{_ARGUMENTS[one.pool]}"


def ms_text(ms: float) -> str:
    """Milliseconds with three digits.

    Example:
        >>> ms_text(0.01234), ms_text(12.345), ms_text(1234.5)
        ('0.0123', '12.3', '1,234')
    """
    return f"{ms:.3g}" if ms < 100 else f"{ms:,.0f}"


def _ms(measurement: Measurement) -> str:
    return f"{ms_text(measurement.ms_per_batch)} ms"
