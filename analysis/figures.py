"""Numbers as people say them, one way everywhere: in the words of evidence and on the page of a verdict."""

from __future__ import annotations


def seconds(value: float) -> str:
    """`1.92 s`, `183 ms`, `45 us`; from 100 s on `4 min 58 s`, `2 h 5 min`, `3 d 4 h`."""
    if value < 0:
        return f"-{seconds(-value)}"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (0.9995, 1e3, "ms"), (100, 1, "s")):
        if value < limit:
            return f"{digits(value * scale)} {unit}"
    minutes, hours = round(value / 60), round(value / 3600)
    if round(value) < 3600:
        return _two(round(value), 60, "min", "s")
    return _two(minutes, 60, "h", "min") if minutes < 24 * 60 else _two(hours, 24, "d", "h")


def _two(count: int, base: int, big: str, small: str) -> str:
    whole, rest = divmod(count, base)
    return f"{whole:,} {big} {rest} {small}" if rest else f"{whole:,} {big}"


def percent(share: float) -> str:
    """`99 %`, `3.1 %`, `0.27 %`: two digits below ten, for the noise of what is measured leaves no more."""
    value = 100 * share
    if abs(value) < 0.005:  # of differences of floats, not of anything measured
        return "0 %"
    return f"{value:,.0f} %" if abs(value) >= 9.95 else f"{digits(float(f'{value:.2g}'))} %"


def gpu_time(value: float) -> str:
    """`1,187 GPU-seconds`, from 10,000 on `16.0 GPU-hours`."""
    return f"{digits(value)} GPU-seconds" if abs(value) < 10_000 else f"{digits(value / 3600)} GPU-hours"


def scaled(value: float, unit: str) -> str:
    """`24.1 MB/s`, `400 Gbit/s`: with the prefix that leaves one to three digits before the point."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{digits(value / limit)} {prefix}{unit}"
    return f"{digits(value)} {unit}"


def digits(value: float) -> str:
    """Three significant digits, thousands set apart, no zeros at the end: `0.61`, `1.92`, `24.1`, `610`, `1,187`."""
    if not value or abs(value) < 1e-9:
        return "0"
    places = max(0, 2 - _magnitude(value))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _magnitude(value: float) -> int:
    """Of 610 it is 2, of 0.061 it is -2."""
    return int(f"{value:e}".split("e")[1])
