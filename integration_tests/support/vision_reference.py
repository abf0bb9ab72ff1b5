"""Tiny models with a vision part, batches of text and images for them, and what transformers makes of both."""

import copy
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_vision

from mca_models.images import ImageSpan, attention_ends, feature_rows, positions

LENGTH, IMAGE = 24, 65
SMALL, WIDE = (2, 2), (2, 4)
"""Rows and columns of tokens of the two sizes of images."""
ROWS: tuple[tuple[tuple[int, tuple[int, int]], ...], ...] = (
    ((3, SMALL), (9, WIDE)),  # the second lies on both sides of a cut in two
    (),
    ((8, WIDE),),
    (),
)
"""Each row's images: where they begin, and their size. The second and the last micro-batch have none."""


@dataclass(frozen=True)
class Mixed:
    """Rows of text and images, and what transformers computes.

    Args:
        path: The checkpoint.
        gradients: A checkpoint with the gradients of the mean loss in the place of weights.
        input_ids: ``[rows, LENGTH]``.
        images: Of each row, what the vision model takes; empty for a row without.
        places: Of each row.
        losses: Of each row, summed over its tokens.
    """

    path: Path
    gradients: Path
    input_ids: torch.Tensor
    images: tuple[dict[str, torch.Tensor], ...]
    places: tuple[tuple[ImageSpan, ...], ...]
    losses: torch.Tensor


def places(case: str) -> tuple[tuple[ImageSpan, ...], ...]:
    """Where the images of each row are; InternVL's tiles and Gemma's images are all of one size."""
    tiled = case.startswith(("internvl", "gemma"))
    return tuple(tuple(ImageSpan(start, *(SMALL if tiled else size)) for start, size in row) for row in ROWS)


def pixels(case: str, row: tuple[ImageSpan, ...], seed: int) -> dict[str, torch.Tensor]:
    """What the vision model of ``case`` takes of the images of a row."""
    if not row:
        return {}
    generator = torch.Generator().manual_seed(seed)
    if case.startswith(("internvl", "gemma")):
        return {"pixel_values": torch.randn(len(row), 3, 16, 16, generator=generator)}
    if case.startswith("mistral3"):
        sizes = torch.tensor([(each.rows * 8, each.columns * 8) for each in row])
        high, wide = sizes.max(0).values.tolist()
        return {
            "pixel_values": torch.randn(len(row), 3, high, wide, generator=generator),
            "image_sizes": sizes,
        }
    grid = torch.tensor([(1, 2 * each.rows, 2 * each.columns) for each in row])
    return {
        "pixel_values": torch.randn(int(grid.prod(1).sum()), 96, generator=generator),
        "image_grid_thw": grid,
    }


@cache
def vision_model(case: str) -> Any:
    """The model of ``case`` in fp32, its weights random and far from their initial ones."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(tiny_vision.described(case)))
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(case))
    saved = model.state_dict()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in saved:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * 0.15 + (1 if tensor.dim() < 2 and "norm" in name else 0))
    return model.float().eval()


def mixed(case: str, folder: Path) -> Mixed:
    """Saves the model of ``case`` and its gradients under ``folder``."""
    model = copy.deepcopy(vision_model(case))
    path, gradients = folder / case, folder / f"{case}-expected"
    model.save_pretrained(path)
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, 64, (len(ROWS), LENGTH), generator=generator)
    where = places(case)
    for ids, row in zip(input_ids, where, strict=True):
        for each in row:
            ids[each.start : each.start + each.tokens] = IMAGE
    images = tuple(pixels(case, row, number) for number, row in enumerate(where))
    losses = losses_of(model, input_ids, images)
    losses.mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(gradients)
    return Mixed(path, gradients, input_ids, images, where, losses.sum(1).detach())


def logits_of(
    model: Any, input_ids: torch.Tensor, images: tuple[dict[str, torch.Tensor], ...]
) -> torch.Tensor:
    """Of each token of each row."""
    inputs = _for_transformers(model.config.model_type, input_ids, images)
    found: torch.Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    return found


def losses_of(
    model: Any, input_ids: torch.Tensor, images: tuple[dict[str, torch.Tensor], ...]
) -> torch.Tensor:
    """Of each row, of each token but the last."""
    logits = logits_of(model, input_ids, images)
    targets = input_ids[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="none")
    return losses.view(len(input_ids), -1)


def stepped(model: Any, reference: Mixed, steps: int, rate: float, clip: float) -> list[float]:
    """The norms of a model's gradients in some steps of AdamW with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses_of(model, reference.input_ids, reference.images).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return norms


def _for_transformers(
    model_type: str, input_ids: torch.Tensor, images: tuple[dict[str, torch.Tensor], ...]
) -> dict[str, torch.Tensor]:
    found = joined(images)
    if "image_grid_thw" in found:
        found["mm_token_type_ids"] = (input_ids == IMAGE).int()
    elif model_type.startswith("gemma"):
        found["token_type_ids"] = (input_ids == IMAGE).int()
    return found


def joined(images: tuple[dict[str, torch.Tensor], ...]) -> dict[str, torch.Tensor]:
    """The images of several rows as those of one batch, of one size where they must be."""
    there = [each for each in images if each]
    if not there:
        return {}
    return {name: torch.cat(_same_size([each[name] for each in there])) for name in there[0]}


def _same_size(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    if parts[0].dim() != 4:
        return parts
    high, wide = (max(part.shape[axis] for part in parts) for axis in (2, 3))
    return [
        torch.nn.functional.pad(part, (0, wide - part.shape[3], 0, high - part.shape[2])) for part in parts
    ]


def batch_of(reference: Mixed, rows: range, *, sections: bool) -> dict[str, Any]:
    """The uncut batch of some rows, with what a chunk takes of images."""
    ids = reference.input_ids[rows.start : rows.stop]
    batch: dict[str, Any] = {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
        "loss_mask": (torch.arange(LENGTH) < LENGTH - 1).float().expand(len(ids), -1),
        "position_ids": torch.arange(LENGTH).expand(len(ids), -1),
    }
    where = [reference.places[row] for row in rows]
    if sections:
        batch["position_ids"] = torch.stack([torch.from_numpy(positions(LENGTH, row)) for row in where], 1)
    if images := joined(tuple(reference.images[row] for row in rows)):
        first, found = 0, []
        for row in where:
            found.append(torch.from_numpy(feature_rows(LENGTH, row, first)))
            first += sum(each.tokens for each in row)
        batch["attention_ends"] = torch.stack(
            [torch.from_numpy(attention_ends(LENGTH, row)) for row in where]
        )
        batch |= {"images": images, "feature_rows": torch.stack(found)}
    return batch
