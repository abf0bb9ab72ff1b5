"""Draw the pictures of the documents into docs/pictures. Run as ``uv run tools/concept_pictures.py``.

Ranks and stages are those of `mca_config.RankGrid` and `mca_config.pipeline_plan`, passes those of the planner's
schedule, and memory that of the table in docs/scale.md, which a test compares with the planner. Loss curves are those
that `integration_tests/support/loss_curves.py --record` has written.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from mca_config import ParallelLayout, RankGrid, pipeline_plan
from mca_train.plan.schedule import Order, timeline

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
_COLOURS = ("#bcd7f0", "#f6cfa8", "#c6e5bd", "#e3c7ea")
_GREY, _INK = "#e6e6e6", "#222222"


class Drawing:
    """Boxes, words and arrows on white, in pixels.

    Args:
        width: Of the whole picture.
        height: Of the whole picture.
        title: For readers who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str, words: str = "") -> None:
        """A rectangle with ``words`` in its middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{colour}" stroke="{_INK}" stroke-width="1"/>'
        )
        lines = words.split("\n") if words else []
        first = y + height / 2 + 12 - 8 * len(lines)
        for number, line in enumerate(lines):
            self.words(x + width / 2, first + 16 * number, line, "middle")

    def words(self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> None:
        """One line of text; ``y`` is its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A line with a head at its end."""
        self._parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{_INK}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A dashed line."""
        self._parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{_INK}" stroke-dasharray="4 3"/>'
        )

    def curve(self, points: Sequence[tuple[float, float]]) -> None:
        """A line through ``points``."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{_INK}" stroke-width="1.5"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        """A small disc."""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" stroke="{_INK}" stroke-width="1"/>'
        )

    def svg(self) -> str:
        """The picture."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{_INK}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif" font-size="13" '
            f'fill="{_INK}"><title>{escape(self.title)}</title><defs>{head}</defs>'
            f'<rect width="100%" height="100%" rx="8" fill="#ffffff"/>{"".join(self._parts)}</svg>\n'
        )


def layout() -> Drawing:
    """Eight ranks at tp 2, pp 2, dp 2: who holds what, and who belongs together."""
    grid = RankGrid(ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 8)
    picture = Drawing(640, 300, "Eight ranks: tensor size 2, pipeline size 2, two replicas")
    for stage in range(2):
        picture.words(150 + 250 * stage + 100, 28, f"pipeline stage {stage}", "middle", bold=True)
        if stage:
            picture.arrow(352, 95, 396, 95)
            picture.arrow(352, 215, 396, 215)
    for replica in range(2):
        picture.words(16, 90 + 120 * replica, f"replica {replica}", bold=True)
        picture.words(16, 108 + 120 * replica, "its own samples")
    for rank in range(8):
        place = grid.coordinates(rank)
        x, y = 150 + 250 * place.pp + 100 * place.tp, 45 + 120 * place.dp
        picture.box(x, y, 98, 90, _COLOURS[place.tp], f"rank {rank}\nhalf {place.tp} of\neach matrix")
    caption = "side by side: a tensor group; one above the other: a data group; arrows: a pipeline"
    picture.words(320, 288, caption, "middle")
    return picture


def stages() -> Drawing:
    """Eight layers on two pipeline ranks, without and with virtual stages."""
    picture = Drawing(640, 250, "Eight layers on two pipeline ranks, without and with virtual stages")
    for row, virtual in enumerate((1, 2)):
        sizes = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual)
        lines = [line for line in str(pipeline_plan(sizes, 8)).splitlines() if line.startswith("pp ")]
        top = 40 + 110 * row
        picture.words(16, top - 14, f"virtual size {virtual}", bold=True)
        for rank, line in enumerate(lines):
            held = [part.strip() for part in line.partition(f"pp {rank}")[2].split("  ") if part.strip()]
            picture.words(16, top + 22 + 40 * rank, f"pipeline rank {rank}")
            width = 500 / len(held)
            for chunk, words in enumerate(held):
                colour = _COLOURS[rank + 2 * chunk]
                picture.box(125 + width * chunk, top + 40 * rank, width - 6, 34, colour, words)
    return picture


def packing() -> Drawing:
    """The same five samples padded, and in packs."""
    lengths = (7, 3, 12, 4, 5)
    picture = Drawing(640, 250, "Five samples, padded to the longest and packed")
    picture.words(16, 24, "padded: 31 of 60 places are used", bold=True)
    for row, length in enumerate(lengths):
        y = 34 + 20 * row
        picture.box(16, y, 20 * length, 16, _COLOURS[row % 4], "")
        if length < 12:
            picture.box(16 + 20 * length, y, 20 * (12 - length), 16, _GREY)
    picture.words(330, 24, "packed: 31 of 36 places are used", bold=True)
    for row, pack in enumerate(((2,), (0, 4), (1, 3))):
        x = 330.0
        for sample in pack:
            picture.box(x, 34 + 20 * row, 20 * lengths[sample], 16, _COLOURS[sample % 4])
            x += 20 * lengths[sample]
        if x < 570:
            picture.box(x, 34 + 20 * row, 570 - x, 16, _GREY)
    for row, text in enumerate(
        (
            "Attention does not look from one sample of a pack into another, positions restart, and",
            "no target reaches over an end. So a step on packs computes what a step on the padded",
            "samples computes; it only leaves out the grey.",
        )
    ):
        picture.words(16, 170 + 20 * row, text)
    return picture


def loss() -> Drawing:
    """Three micro-batches with different numbers of targets."""
    picture = Drawing(640, 230, "The loss of a step is one mean over all targets")
    sums, counts = (12.0, 2.0, 4.0), (6, 2, 1)
    for number, (total, count) in enumerate(zip(sums, counts, strict=True)):
        x = 16 + 210 * number
        picture.box(
            x, 20, 190, 54, _COLOURS[number], f"micro-batch {number}\nsum {total:g} over {count} targets"
        )
        picture.arrow(x + 95, 78, 320 + (x + 95 - 320) * 0.3, 112)
    mean = sum(sums) / sum(counts)
    means = sum(total / count for total, count in zip(sums, counts, strict=True)) / 3
    picture.box(
        170, 116, 300, 40, _GREY, f"{sum(sums):g} / {sum(counts)} targets = {mean:g}: the loss of the step"
    )
    picture.words(
        320, 186, f"The mean of the three means would be {means:.2f}: a target would weigh more", "middle"
    )
    picture.words(320, 204, "where there are few, and the result would depend on the layout.", "middle")
    return picture


def checkpoint() -> Drawing:
    """Files of a Hugging Face checkpoint, of an MCA one at tp 2 and pp 2, and back."""
    picture = Drawing(
        640, 240, "Hugging Face files become a file for each pipeline and tensor rank, and back"
    )
    picture.words(16, 26, "Hugging Face", bold=True)
    picture.words(250, 26, "MCA: tp 2, pp 2", bold=True)
    picture.words(490, 26, "Hugging Face", bold=True)
    for number in range(2):
        for x in (16, 490):
            name = f"model-0000{number + 1}-of-2\n.safetensors"
            picture.box(x, 40 + 60 * number, 134, 50, _GREY, name)
    for x in (16, 490):
        picture.box(x, 160, 134, 40, _GREY, "config, tokenizer")
    for stage in range(2):
        for rank in range(2):
            words = f"pp_00{stage}/tp_0{rank}"
            picture.box(235, 40 + 56 * stage + 27 * rank, 170, 24, _COLOURS[rank], words)
    picture.box(235, 160, 170, 40, _GREY, "mca_config.json,\nmanifest, side files")
    picture.arrow(155, 110, 228, 110)
    picture.arrow(410, 110, 483, 110)
    picture.words(320, 226, "bit-exact, tensor by tensor", "middle")
    return picture


def journey() -> Drawing:
    """A model's way from Hugging Face to Megatron and back, with the command of each step."""
    picture = Drawing(640, 150, "Hugging Face checkpoint, MCA checkpoint, training, Hugging Face checkpoint")
    boxes = (
        ("Hugging Face\ncheckpoint", _GREY),
        ("MCA checkpoint\n(any layout)", _COLOURS[0]),
        ("Megatron-core\ntraining", _COLOURS[1]),
        ("Hugging Face\ncheckpoint", _GREY),
    )
    for number, (words, colour) in enumerate(boxes):
        picture.box(16 + 160 * number, 50, 128, 56, colour, words)
    for number, command in enumerate(("mca-convert", "mca-train", "mca-convert")):
        picture.arrow(148 + 160 * number, 78, 172 + 160 * number, 78)
        picture.words(160 + 160 * number, 32, command, "middle", bold=True)
    picture.words(320, 136, "mca-train also reads and writes Hugging Face checkpoints directly", "middle")
    return picture


def step() -> Drawing:
    """Data flow of a step, from the global batch to the updated weights."""
    picture = Drawing(
        640, 206, "A global batch is divided into micro-batches, computed by stages, and reduced"
    )
    boxes = (
        ("global batch\n16 samples", _GREY),
        ("replica 0\n4 micro-batches", _COLOURS[0]),
        ("stage 0\nembedding, layers", _COLOURS[1]),
        ("stage 1\nlayers, loss", _COLOURS[1]),
    )
    for number, (words, colour) in enumerate(boxes):
        picture.box(16 + 158 * number, 20, 130, 48, colour, words)
        if number:
            picture.arrow(146 + 158 * (number - 1), 44, 172 + 158 * (number - 1), 44)
    picture.box(174, 84, 130, 48, _COLOURS[2], "replica 1\n4 micro-batches")
    picture.box(332, 84, 288, 48, _COLOURS[2], "the same stages, its own samples")
    picture.arrow(146, 60, 172, 100)
    picture.arrow(304, 108, 330, 108)
    for row, words in enumerate(
        (
            "Sums of the loss, numbers of targets and gradients of both replicas are added,",
            "divided once and clipped. Each rank steps its shard of the optimizer, and the weights",
            "are gathered.",
        )
    ):
        picture.words(320, 160 + 18 * row, words, "middle")
    return picture


def schedule() -> Drawing:
    """Passes of four micro-batches on two stages of two chunks; a backward pass takes twice as long."""
    pp, vpp, micro_batches = 2, 2, 4
    orders = [list(Order(pp, vpp, micro_batches).passes(rank)) for rank in range(pp)]
    passes = timeline(orders, vpp, lambda _, each: 1.0 if each.forward else 2.0)
    unit = 550 / max(each.end for each in passes)
    picture = Drawing(640, 178, "Schedule of a step: passes of each micro-batch on two pipeline stages")
    for rank in range(pp):
        picture.words(16, 40 + 48 * rank, f"stage {rank}")
        picture.box(74, 18 + 48 * rank, 550, 36, _GREY)
    for each in passes:
        colour = _COLOURS[each.step.chunk if each.step.forward else 2 + each.step.chunk]
        width = unit * (each.end - each.start)
        picture.box(
            74 + unit * each.start, 18 + 48 * each.rank, width, 36, colour, str(each.step.micro_batch)
        )
    legend = ("forward, chunk 0", "forward, chunk 1", "backward, chunk 0", "backward, chunk 1", "waiting")
    for number, (words, colour) in enumerate(zip(legend, (*_COLOURS, _GREY), strict=True)):
        x, y = 16 + 170 * (number % 3), 118 + 26 * (number // 3)
        picture.box(x, y, 14, 14, colour)
        picture.words(x + 18, y + 12, words)
    return picture


MEMORY_PAGE = FOLDER.parent / "scale.md"
_MEMORY = ("weights", "gradients", "optimizer", "activations")


def memory_rows() -> list[tuple[str, list[float]]]:
    """Return the keys and the GiB of each row of the table in docs/scale.md."""
    table = MEMORY_PAGE.read_text(encoding="utf-8").partition("<!-- memory of qwen3-8b -->")[2]
    rows = re.findall(r"^\| (.+?) ((?:\| [\d.]+ ){5})\|$", table.partition("<!-- end")[0], re.MULTILINE)
    return [(keys, [float(cell) for cell in cells.split("|") if cell.strip()]) for keys, cells in rows]


def memory() -> Drawing:
    """Memory of a rank by what it holds, for each row of the table."""
    rows = memory_rows()
    picture = Drawing(
        640, 70 + 30 * len(rows), "Memory of a rank by what it holds, for each row of the table"
    )
    scale, left = 1.9, 250
    for number, (keys, cells) in enumerate(rows):
        x, y = float(left), 14 + 30 * number
        picture.words(left - 8, y + 15, keys.replace("`", "").partition(",")[0], "end")
        for part, size in enumerate(cells[:-1]):
            picture.box(x, y, scale * size, 20, _COLOURS[part])
            x += scale * size
        picture.words(624, y + 15, f"{cells[-1]:.0f} GiB", "end")
    limit, bottom = left + scale * 75.1, 20 + 30 * len(rows)
    picture.line(limit, 8, limit, bottom)
    picture.words(limit, bottom + 14, "75 GiB usable", "middle")
    for part, words in enumerate(_MEMORY):
        picture.box(16 + 110 * part, bottom + 26, 14, 14, _COLOURS[part])
        picture.words(34 + 110 * part, bottom + 38, words)
    return picture


CURVES = FOLDER.parent / "validation" / "loss_curves.json"
_PLOT = (40, 16, 260, 200)
"""Left, top, width and height of the area of one model's curves."""
_SHOWN = (3.4, 5.2)
"""Losses at the bottom and the top of that area."""


def loss_curves() -> Drawing:
    """Losses of the single process of two models, and of two layouts of each."""
    picture = Drawing(640, 290, "Losses of 50 steps of two models, of one process and of two layouts of each")
    left, top, width, height = _PLOT
    for column, (model, runs) in enumerate(json.loads(CURVES.read_text(encoding="utf-8")).items()):
        x0 = left + 320 * column
        _axes(picture, x0)
        (_, single), *layouts = runs.items()
        picture.curve([_point(x0, step, value) for step, value in enumerate(single)])
        picture.words(x0 + width, top + 14, f"{model}: the line is one process", "end")
        for number, (layout, losses) in enumerate(layouts):
            for step in range(3 * number, len(losses), 6):
                picture.dot(*_point(x0, step, losses[step]), _COLOURS[number])
            worst = max(abs(one - other) / one for one, other in zip(single, losses, strict=True))
            y = top + height + 40 + 18 * number
            picture.dot(x0 + 6, y - 4, _COLOURS[number])
            picture.words(x0 + 18, y, f"{layout}: {worst:.1e}")
    return picture


def _axes(picture: Drawing, x0: float) -> None:
    """Steps below, losses on the left."""
    _, top, width, height = _PLOT
    picture.line(x0, top + height, x0 + width, top + height)
    for step in (1, 25, 50):
        picture.words(
            _point(x0, step - 1, 0)[0],
            top + height + 16,
            f"step {step}" if step == 1 else f"{step}",
            "middle",
        )
    for value in (3.5, 4.0, 4.5, 5.0):
        picture.words(x0 - 6, _point(x0, 0, value)[1] + 4, f"{value:g}", "end")


def _point(x0: float, step: int, value: float) -> tuple[float, float]:
    """Place of a loss of a step, counted from 0."""
    _, top, width, height = _PLOT
    low, high = _SHOWN
    return x0 + width * step / 49, top + height * (high - value) / (high - low)


PICTURES = {
    "journey": journey,
    "layout": layout,
    "stages": stages,
    "packing": packing,
    "loss": loss,
    "checkpoint": checkpoint,
    "step": step,
    "schedule": schedule,
    "memory": memory,
    "loss_curves": loss_curves,
}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
