"""Formats numbers and knobs as text: the only file with prefixes, percent signs and thousands separators."""

import math
from collections.abc import Mapping

_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNT = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MISSING = "–"


def digits(value: float) -> str:
    """Three significant digits without an exponent: 0.123, 1.23, 12.3, 123, 1,234."""
    size = abs(value)
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 or size == 0 else 3
    return f"{value:,.{places}f}"


def seconds(value: float | None) -> str:
    """Seconds as text: `0.0123` → `12.3 ms`; minutes and hours from 60 s on; a missing value is a dash.

    >>> seconds(0.0123), seconds(75), seconds(4000), seconds(0), seconds(None)
    ('12.3 ms', '1 min 15 s', '1 h 07 min', '0 s', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    if value == 0:
        return "0 s"
    if abs(value) >= 3599.5:
        minutes = round(value / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if abs(value) >= 59.95:
        return f"{round(value) // 60} min {round(value) % 60:02d} s"
    scale, unit = next(((s, u) for s, u in _TIME if abs(value) >= 0.9995 * s), _TIME[-1])
    return f"{digits(value / scale)} {unit}"


def bytes_(value: float | None) -> str:
    """Bytes as text with binary prefixes (1 GiB = 2**30 B): `1610612736` → `1.50 GiB`.

    >>> bytes_(1610612736), bytes_(512), bytes_(0), bytes_(None)
    ('1.50 GiB', '512 B', '0 B', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    for scale, unit in _BYTES:
        if abs(value) >= 0.9995 * scale:
            return f"{digits(value / scale)} {unit}"
    return f"{value:,.0f} B"


def knobs(changes: Mapping[str, object]) -> str:
    """`{"precision": "amp_bf16", "micro_batch": 8}` → "precision=amp_bf16, micro_batch=8"."""
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def count(value: float | None, unit: str = "") -> str:
    """A count as text with decimal prefixes: `11_700_000` → `11.7 M`; below 10,000 it stays whole.

    >>> count(11_700_000), count(9_400), count(989e12, "FLOP/s")
    ('11.7 M', '9,400', '989 TFLOP/s')
    """
    if value is None or math.isnan(value):
        return MISSING
    for scale, prefix in _COUNT:
        if abs(value) >= max(0.9995 * scale, 10_000 if scale == 1e3 else 0):
            return f"{digits(value / scale)} {prefix}{unit}"
    text = f"{value:,.0f}" if float(value).is_integer() else digits(value)
    return f"{text} {unit}".rstrip()


def rate(value: float | None, what: str = "samples") -> str:
    """A rate as text: `1234.5` → `1,234 samples/s`.

    >>> rate(1234.5), rate(8.25, "steps")
    ('1,234 samples/s', '8.25 steps/s')
    """
    if value is None or math.isnan(value):
        return MISSING
    return f"{digits(value)} {what}/s"


def percent(fraction: float | None) -> str:
    """A fraction in 0..1 as text: `0.413` → `41 %`; below ten percent with one decimal.

    >>> percent(0.413), percent(0.034), percent(0.0)
    ('41 %', '3.4 %', '0 %')
    """
    if fraction is None or math.isnan(fraction):
        return MISSING
    value = 100 * fraction
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def times(ratio: float | None) -> str:
    """A ratio as text: `1.592` → `1.59×`.

    >>> times(1.592)
    '1.59×'
    """
    return MISSING if ratio is None or math.isnan(ratio) else f"{digits(ratio)}×"


def several(number: int, what: str) -> str:
    """A number of things, in words.

    >>> several(1, "step"), several(3, "step")
    ('1 step', '3 steps')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"
