"""Numbers for people."""

from __future__ import annotations

import math


def number_text(value: float | int | None, digits: int = 3) -> str:
    """A number for a sentence: thousands separated, few digits, powers of ten as ``1.2e-05``.

    Example:
        >>> (
        ...     number_text(11689512),
        ...     number_text(0.25),
        ...     number_text(390.4, 2),
        ...     number_text(1.234e-7),
        ...     number_text(None),
        ... )
        ('11,689,512', '0.25', '390', '1.23e-07', 'none')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "none"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "infinity" if value > 0 else "-infinity"
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e6 else f"{value:.{digits}g}"


def plural(count: int, noun: str, many: str = "") -> str:
    """``"1 unit"``, ``"2 units"``.

    Example:
        >>> plural(1, "unit"), plural(2000, "unit"), plural(2, "class", "classes")
        ('1 unit', '2,000 units', '2 classes')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def power_of_ten(log: float) -> str:
    """A power of ten, written out if it is short.

    Example:
        >>> power_of_ten(0.0), power_of_ten(-1.0), power_of_ten(13.25)
        ('1', '0.1', '10^13.2')
    """
    return number_text(10**log, 2) if -4 < log < 5 else f"10^{log:.1f}"


def shortened(name: str, most: int = 26) -> str:
    """The end of a long name, because names of layers differ at their ends.

    Example:
        >>> shortened("body.conv1"), shortened("encoder.layers.11.attention.output.dense")
        ('body.conv1', '…11.attention.output.dense')
    """
    return name if len(name) <= most else "…" + name[-most + 1 :]
