"""Charts as inline SVG of a page."""

import math
from collections.abc import Sequence
from html import escape

from mca_train.report.run_files import Points

COLOURS = ("#1f5fa8", "#d9720b")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 210, 58, 26, 10


def lines(name: str, curves: Sequence[tuple[str, Points]]) -> str:
    """Return a chart with one curve for each run, over steps, without non-finite values."""
    kept = [(label, [(x, y) for x, y in points if math.isfinite(y)]) for label, points in curves]
    points = [point for _, some in kept for point in some]
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    high, last = (high if high > low else low + (abs(low) or 1.0)), (last if last > first else first + 1)

    def point(x: float, y: float) -> str:
        across = _LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT - 10)
        down = _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    marks = [_mark(value, point(first, value)) for value in (low, (low + high) / 2, high)]
    for number, (label, some) in enumerate(kept):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(point(x, y) for x, y in some)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(some) < 40:
            marks += [
                f'<circle cx="{point(x, y).split(",")[0]}" cy="{point(x, y).split(",")[1]}" r="2.2" fill="{colour}">'
                f"<title>{escape(label)}, step {x:g}: {y:g}</title></circle>"
                for x, y in some
            ]
    bottom = _HEIGHT - 8
    marks.append(f'<text x="{_LEFT}" y="{bottom}">step {first:g}</text>')
    marks.append(f'<text x="{_WIDTH - 10}" y="{bottom}" text-anchor="end">{last:g}</text>')
    return f"<figure><figcaption>{escape(name)}</figcaption>{_svg(_WIDTH, _HEIGHT, marks)}</figure>"


def _mark(value: float, at: str) -> str:
    down = at.split(",")[1]
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{down}" y2="{down}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 5}" y="{float(down) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    )


def bars(title: str, parts: dict[str, str], rows: Sequence[tuple[str, dict[str, float]]], unit: str) -> str:
    """Return a chart with a stacked bar for each row.

    Args:
        title: Title of the chart.
        parts: Names and colours of the stacked parts.
        rows: Names, and sizes by part.
        unit: Unit of the sizes.
    """
    most = max((sum(sizes.values()) for _, sizes in rows), default=0.0) or 1.0
    marks = []
    for number, (name, sizes) in enumerate(rows):
        across, down = 100.0, 10 + 24 * number
        marks.append(f'<text x="94" y="{down + 13}" text-anchor="end">{escape(name)}</text>')
        for part, colour in parts.items():
            width = sizes.get(part, 0.0) / most * 640
            marks.append(
                f'<rect x="{across:.1f}" y="{down}" width="{width:.1f}" height="18" fill="{colour}">'
                f"<title>{escape(part)}: {sizes.get(part, 0.0):.3g} {unit}</title></rect>"
            )
            across += width
        marks.append(f'<text x="{across + 6:.1f}" y="{down + 13}">{sum(sizes.values()):.3g} {unit}</text>')
    key = "".join(
        f'<span style="color:{colour}">&#9632;</span> {escape(part)} ' for part, colour in parts.items()
    )
    drawn = _svg(840, 20 + 24 * len(rows), marks)
    return f"<figure><figcaption>{escape(title)} &nbsp; {key}</figcaption>{drawn}</figure>"


def _svg(width: int, height: int, marks: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"{''.join(marks)}</svg>"
    )
