"""Tiny models with a vision part, batches of text, images and videos for them, and what transformers makes of both."""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_vision

import omni_reference
import tiled_reference
from mca_models.media import ImageSpan, attention_ends, batch_feature_rows, positions
from mca_models.megatron.features.media_features import join_patches

LENGTH, IMAGE, VIDEO = 24, 65, 66
SMALL, WIDE = (2, 2), (2, 4)
"""Rows and columns of tokens of the two sizes of images."""
ROWS: tuple[tuple[tuple[int, tuple[int, int]], ...], ...] = (
    ((3, SMALL), (9, WIDE)),  # the second lies on both sides of a cut in two
    (),
    ((8, WIDE),),
    (),
)
"""Each row's images: where they begin, and their size. The second and the last micro-batch have none."""
HEARING = ("qwen2_audio", "qwen3_asr", "voxtral", "audioflamingo3", "glmasr")
"""Begin the names of cases whose rows have audio clips, each of as many tokens as an image."""
SEEING_AND_HEARING = ("gemma4-e2b", "gemma4_unified")
"""Begin the names of cases whose rows have small images, and audio clips in the place of wide ones."""
CLIP = 67
"""Placeholder of their clips."""
WITH_VIDEOS = "-video"
"""Ends the names of cases whose rows have videos."""
VIDEOS_ALONE = ("glm4v-", "glm4v_moe-", "glm_ocr-")
"""Models whose videos have the placeholder of images, and which transformers runs with one of both alone."""
VIDEO_ROWS: tuple[tuple[tuple[int, int], ...], ...] = (((3, 0), (9, 2)), (), ((2, 3), (18, 0)), ())
"""Each row's media of the small size: where they begin, and how many frames a video has; 0: an image."""
LONE_VIDEO_ROWS: tuple[tuple[tuple[int, int], ...], ...] = (((1, 0), (14, 2)), (), ((2, 3), (10, 0)), ())
"""The same of LLaVA-OneVision, whose images are the only ones of their rows and have more tokens."""
SECONDS = (1.5, 0.3)
"""From one frame to the next of each video."""
ONE_SIZE = (
    "internvl",
    "qianfan_ocr",
    "got_ocr2",
    "gemma3",
    "llava",
    "vipllava",
    "deepseek_vl",
    "llama4",
    "cohere2_vision",
    "aya_vision",
)
"""Begin the names of cases whose images are all of one size."""
ALONE = ("idefics3", "smolvlm")
"""The same, where transformers takes a batch of tiles for each row; here each tile is a separate image."""
SIZED = ("lfm2_vl", "minicpmv4_6", "mistral3", "lighton_ocr")
"""Begin the names of cases whose images have sizes next to their pixels."""
TOKENS_PER_SECOND = 4  # the default of Qwen 2.5 VL


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
    """Return the positions of each row's images; InternVL's tiles and Gemma's images have one size."""
    if case.startswith(omni_reference.OMNI):
        return omni_reference.places(case)
    if case.endswith(WITH_VIDEOS):
        return _video_places(case)
    if case.startswith(HEARING):
        return tuple(
            tuple(ImageSpan(start, 1, high * wide, medium="audio") for start, (high, wide) in row)
            for row in ROWS
        )
    if case.startswith(SEEING_AND_HEARING):
        return tuple(
            tuple(
                ImageSpan(start, *size) if size == SMALL else ImageSpan(start, 1, 8, medium="audio")
                for start, size in row
            )
            for row in ROWS
        )
    if case.startswith(tiled_reference.CASES):
        return tiled_reference.places(case)
    tiled = case.startswith((*ONE_SIZE, *ALONE))
    return tuple(tuple(ImageSpan(start, *(SMALL if tiled else size)) for start, size in row) for row in ROWS)


def _video_places(case: str) -> tuple[tuple[ImageSpan, ...], ...]:
    """A video of Qwen 2 VL and EXAONE is one span; later families put text between its frames."""
    if case.startswith("llava_onevision"):
        return tuple(
            tuple(ImageSpan(start, 1, frames + 1 if frames else 10) for start, frames in row)
            for row in LONE_VIDEO_ROWS
        )
    seconds = iter(SECONDS)
    found = []
    for row in VIDEO_ROWS:
        spans: list[ImageSpan] = []
        for start, frames in row:
            interval = next(seconds) * TOKENS_PER_SECOND if frames and case.startswith("qwen2_5") else 1.0
            if case.startswith(("qwen2", "exaone")):
                spans.append(ImageSpan(start, *SMALL, max(frames, 1), interval))
            else:
                spans += [ImageSpan(start + number * 5, *SMALL) for number in range(max(frames, 1))]
        found.append(tuple(spans))
    return tuple(found)


def _video_pixels(case: str, number: int) -> dict[str, torch.Tensor]:
    """Return transformers' inputs for the images and videos of row ``number``."""
    generator = torch.Generator().manual_seed(number)
    if case.startswith("gemma4"):
        return _pooled_videos(case, number, generator)
    if case.startswith("llava_onevision"):
        return _lone_media(number, generator)
    if case.startswith("minicpmv4_6"):
        return _loose_videos(number, generator)
    high, wide = 2 * SMALL[0], 2 * SMALL[1]
    found = {}
    of_images = [1 for _, frames in VIDEO_ROWS[number] if not frames]
    of_videos = [frames for _, frames in VIDEO_ROWS[number] if frames]
    if case.startswith(VIDEOS_ALONE):
        of_images, of_videos = [], [frames or 1 for _, frames in VIDEO_ROWS[number]]
    for prefix, suffix, counts in (("image", "", of_images), ("video", "_videos", of_videos)):
        if not counts:
            continue
        found[f"pixel_values{suffix}"] = torch.randn(sum(counts) * high * wide, 96, generator=generator)
        found[f"{prefix}_grid_thw"] = torch.tensor([(count, high, wide) for count in counts])
    if case.startswith("qwen2_5"):
        found["second_per_grid_ts"] = torch.tensor([SECONDS[number // 2]])
    return found


def _loose_videos(number: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return MiniCPM's patches of the images and the frames of row ``number``."""
    found, media = {}, VIDEO_ROWS[number]
    counts = {"": sum(not frames for _, frames in media), "_videos": sum(frames for _, frames in media)}
    for suffix, count in counts.items():
        sizes = torch.tensor([[4 * SMALL[0], 4 * SMALL[1]]] * count)
        patches = torch.randn(int(sizes.prod(1).sum()), 3, 4, 4, generator=generator)
        found |= {f"pixel_values{suffix}": patches, f"target_sizes{suffix}": sizes}
    return found


def _pooled(case: str, row: Sequence[ImageSpan], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return Gemma 4's patches of images and their columns and rows, which are -1 for padding."""
    if not row:
        return {}
    merge, values = (1, 48) if case.startswith("gemma4_unified") else (2, 12)
    grids = [(merge * each.rows, merge * each.columns) for each in row]
    places = [torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1) for high, wide in grids]
    patches = torch.nn.utils.rnn.pad_sequence(
        [torch.rand(len(each), values, generator=generator) for each in places], batch_first=True
    )
    positions = torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)
    return {"pixel_values": patches, "image_position_ids": positions}


def _framed(case: str, row: Sequence[ImageSpan], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return Gemma 4's spectra or samples of clips, whose padding is noise too."""
    if not row:
        return {}
    merge, values = (1, 12) if case.startswith("gemma4_unified") else (4, 8)
    frames = torch.tensor([merge * each.tokens for each in row])
    most = int(frames.max()) + 2 * merge
    return {
        "input_features": torch.randn(len(row), most, values, generator=generator),
        "input_features_mask": torch.arange(most) < (frames - merge // 2)[:, None],
    }


def _pooled_videos(case: str, number: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return Gemma 4's patches of the images and the frames of row ``number``."""
    media = VIDEO_ROWS[number]
    images = _pooled(case, tuple(ImageSpan(0, *SMALL) for _, frames in media if not frames), generator)
    counts = [frames for _, frames in media if frames]
    found = _pooled(case, tuple(ImageSpan(0, *SMALL) for _ in range(sum(counts))), generator)
    videos = {"pixel_values_videos": found["pixel_values"], "video_position_ids": found["image_position_ids"]}
    return {**images, **videos, "num_frames_per_video": torch.tensor(counts)}


def pixels(case: str, row: tuple[ImageSpan, ...], number: int) -> dict[str, torch.Tensor]:
    """Return transformers' inputs for the images of row ``number``."""
    if not row:
        return {}
    if case.startswith(omni_reference.OMNI):
        return omni_reference.inputs(case, number)
    if case.endswith(WITH_VIDEOS):
        return _video_pixels(case, number)
    generator = torch.Generator().manual_seed(number)
    if case.startswith("gemma4"):
        images, clips = ([each for each in row if each.medium == medium] for medium in ("image", "audio"))
        return _pooled(case, images, generator) | _framed(case, clips, generator)
    if case.startswith(tiled_reference.CASES):
        return tiled_reference.pixels(case, number, generator)
    if case.startswith((*ONE_SIZE, *ALONE)):
        alone = (1,) if case.startswith(ALONE) else ()
        return {"pixel_values": torch.randn(len(row), *alone, 3, 16, 16, generator=generator)}
    if case.startswith(SIZED):
        return _sized(case, row, generator)
    if case.startswith(HEARING):
        return _clips(case, row, generator)
    grid = torch.tensor([(1, 2 * each.rows, 2 * each.columns) for each in row])
    patch = (3, 4, 4) if case.startswith("kimi") else (96,)
    return {
        "pixel_values": torch.randn(int(grid.prod(1).sum()), *patch, generator=generator),
        "image_grid_thw": grid,
    }


def _sized(case: str, row: Sequence[ImageSpan], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return images of any size, with their sizes in pixels or in patches."""
    if case.startswith("lfm2_vl"):
        shapes = torch.tensor([(2 * each.rows, 2 * each.columns) for each in row])
        most = int(shapes.prod(1).max()) + 3
        return {
            "pixel_values": torch.randn(len(row), most, 48, generator=generator),
            "pixel_attention_mask": (torch.arange(most) < shapes.prod(1)[:, None]).int(),
            "spatial_shapes": shapes,
        }
    if case.startswith("minicpmv4_6"):
        sizes = torch.tensor([(4 * each.rows, 4 * each.columns) for each in row])
        patches = torch.randn(int(sizes.prod(1).sum()), 3, 4, 4, generator=generator)
        return {"pixel_values": patches, "target_sizes": sizes}
    sizes = torch.tensor([(each.rows * 8, each.columns * 8) for each in row])
    high, wide = sizes.max(0).values.tolist()
    return {
        "pixel_values": torch.randn(len(row), 3, high, wide, generator=generator),
        "image_sizes": sizes,
    }


def _lone_media(number: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return LLaVA-OneVision's image and video of row ``number``."""
    found = tiled_reference.joined_tiles([(16, 16)], generator) | {
        "batch_num_images": torch.ones(1, dtype=torch.int64)
    }
    frames = max(frames for _, frames in LONE_VIDEO_ROWS[number])
    return found | {"pixel_values_videos": torch.randn(1, frames, 3, 16, 16, generator=generator)}


def _clips(case: str, row: tuple[ImageSpan, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return spectrograms of clips, padded to one length, whose padding is noise too."""
    frames, most, mask = (
        4,
        4 * max(height * width for height, width in (SMALL, WIDE)),
        "feature_attention_mask",
    )
    if case.startswith("voxtral"):  # windows of four tokens, without a mask
        return {
            "input_features": torch.randn(sum(each.tokens for each in row) // 4, 8, 32, generator=generator)
        }
    if case.startswith("qwen3_asr"):
        frames, most, mask = 8, 100, "input_features_mask"
    if case.startswith("audioflamingo3"):
        mask = "input_features_mask"
    if case.startswith("glmasr"):
        frames, most, mask = 8, 72, "input_features_mask"
    counts = torch.tensor([frames * each.tokens for each in row])
    return {
        "input_features": torch.randn(len(row), 8, most, generator=generator),
        mask: (torch.arange(most) < counts[:, None]).long(),
    }


@cache
def vision_model(case: str) -> Any:
    """The model of ``case`` in fp32, its weights random and far from their initial ones."""
    described = tiny_vision.described(case.removesuffix(WITH_VIDEOS))
    config = transformers.AutoConfig.for_model(**copy.deepcopy(described))
    model = transformers.AutoModelForMultimodalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(case))
    saved = model.state_dict()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in saved:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * 0.15 + (1 if tensor.dim() < 2 and "norm" in name else 0))
            if case.startswith("gemma4") and name.endswith("q_norm.weight"):
                tensor.mul_(0.3)  # scores are not scaled, and steep ones turn rounding into errors above 1e-4
        tiny_vision.bound_linears(model)
    return model.float().eval()


def rows_of(
    case: str,
) -> tuple[torch.Tensor, tuple[tuple[ImageSpan, ...], ...], tuple[dict[str, torch.Tensor], ...]]:
    """Return the tokens ``[rows, LENGTH]``, the positions and transformers' inputs of each row's images."""
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, 64, (len(ROWS), LENGTH), generator=generator)
    where, rows = places(case), LONE_VIDEO_ROWS if case.startswith("llava_onevision") else VIDEO_ROWS
    for number, (ids, row, media) in enumerate(zip(input_ids, where, rows, strict=True)):
        if case.startswith(omni_reference.OMNI):
            omni_reference.write_tokens(ids, number)
            continue
        images_start = {start for start, frames in media if not frames}
        for each in row:
            is_image = not case.endswith(WITH_VIDEOS) or each.start in images_start
            is_image |= case.startswith(VIDEOS_ALONE)
            is_clip = each.medium == "audio" and case.startswith(SEEING_AND_HEARING)
            ids[each.start : each.start + each.tokens] = CLIP if is_clip else IMAGE if is_image else VIDEO
        if case.startswith(tiled_reference.MARKED):
            tiled_reference.write_tokens(ids, number)
    images = tuple(pixels(case, row, number) for number, row in enumerate(where))
    return input_ids, where, images


def mixed(case: str, folder: Path) -> Mixed:
    """Saves the model of ``case`` and its gradients under ``folder``."""
    model = copy.deepcopy(vision_model(case))
    path, gradients = folder / case, folder / f"{case}-expected"
    model.save_pretrained(path)
    input_ids, where, images = rows_of(case)
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
    """Return the loss of each token of each row; computed alone where padding by others counts."""
    # a clip of Qwen 3 Omni depends on its padding, and transformers takes padding for frames of LLaVA-OneVision
    if model.config.model_type.startswith(("qwen3_omni", "llava_onevision")) and len(images) > 1:
        rows = zip(input_ids, images, strict=True)
        return torch.cat([logits_of(model, ids[None], (each,)) for ids, each in rows])
    inputs = _for_transformers(model.config.model_type, input_ids, images)
    found: torch.Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    return found


def hidden_of(
    model: Any, input_ids: torch.Tensor, images: tuple[dict[str, torch.Tensor], ...]
) -> torch.Tensor:
    """Return the hidden states of each row, of transformers' ``model`` without a head."""
    inputs = _for_transformers(model.config.model_type, input_ids, images)
    found: torch.Tensor = model(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    return found


def losses_of(
    model: Any, input_ids: torch.Tensor, images: tuple[dict[str, torch.Tensor], ...]
) -> torch.Tensor:
    """Return the losses of each row, of each token but the last."""
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
    if model_type.startswith(omni_reference.OMNI):
        found["attention_mask"] = torch.ones_like(input_ids)
    elif "video_grid_thw" in found and "image_grid_thw" not in found:
        found["mm_token_type_ids"] = 2 * (input_ids == IMAGE).int()
    elif "image_grid_thw" in found or model_type.startswith("gemma4"):
        found["mm_token_type_ids"] = (input_ids == IMAGE).int() + 2 * (input_ids == VIDEO).int()
    elif "grids" in found:
        del found["grids"]
    elif "target_sizes" in found:
        found = as_processed(found)
    elif "batch_num_images" in found:
        found["batch_num_images"] = torch.tensor([len(each["image_sizes"]) for each in images if each])
    elif model_type.startswith("gemma"):
        found["token_type_ids"] = (input_ids == IMAGE).int()
    return found


def as_processed(images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a row's inputs in the form of its processor: MiniCPM's patches are next to each other."""
    is_loose = "target_sizes" in images
    return {
        name: join_patches(each) if is_loose and name.startswith("pixel_values") else each
        for name, each in images.items()
    }


def joined(images: tuple[dict[str, torch.Tensor], ...]) -> dict[str, torch.Tensor]:
    """The images of several rows as those of one batch, of one size where they must be."""
    there = [each for each in images if each]
    if not there:
        return {}
    names = dict.fromkeys(name for each in there for name in each)
    return {name: torch.cat(_same_size([each[name] for each in there if name in each])) for name in names}


def of_chunk(
    images: dict[str, torch.Tensor], ids: torch.Tensor, row: tuple[ImageSpan, ...]
) -> dict[str, torch.Tensor]:
    """Return a chunk's inputs for a row's images and videos: the frames of both, in the order of their tokens."""
    if "num_frames_per_video" in images:
        return _frames_of_chunk(images, ids, row)
    if "pixel_values_videos" in images and "batch_num_images" in images:
        return _lone_media_of_chunk(images, is_image_first=int(ids[row[0].start]) == IMAGE)
    if "target_sizes_videos" in images:
        return _loose_frames_of_chunk(images, ids, row)
    if "video_grid_thw" not in images:
        return images
    videos = images["pixel_values_videos"]
    left = {IMAGE: images.get("pixel_values", videos), VIDEO: videos}
    found, grids = [], []
    for each in row:
        token = int(ids[each.start])
        found.append(left[token][: 4 * each.tokens])
        left[token] = left[token][4 * each.tokens :]
        grids += [(1, 2 * each.rows, 2 * each.columns)] * each.frames
    return {"pixel_values": torch.cat(found), "image_grid_thw": torch.tensor(grids)}


def _loose_frames_of_chunk(
    images: dict[str, torch.Tensor], ids: torch.Tensor, row: tuple[ImageSpan, ...]
) -> dict[str, torch.Tensor]:
    """Return MiniCPM's images and frames, all of the small size, in the order of their tokens."""
    left = {
        token: iter(images[f"pixel_values{suffix}"].split(16 * SMALL[0] * SMALL[1]))
        for token, suffix in ((IMAGE, ""), (VIDEO, "_videos"))
    }
    sizes = torch.tensor([[4 * SMALL[0], 4 * SMALL[1]]] * len(row))
    return {
        "pixel_values": torch.cat([next(left[int(ids[each.start])]) for each in row]),
        "target_sizes": sizes,
    }


def _lone_media_of_chunk(images: dict[str, torch.Tensor], *, is_image_first: bool) -> dict[str, torch.Tensor]:
    """Return LLaVA-OneVision's image and video as media of one kind, in the order of their tokens."""
    video = images["pixel_values_videos"]
    media = [
        {name: images[name] for name in ("pixel_values", "image_sizes", "batch_num_images")},
        {
            "pixel_values": video,
            "image_sizes": torch.tensor([video.shape[-2:]]),
            "batch_num_images": torch.tensor([-video.shape[1]]),
        },
    ]
    return joined(tuple(media if is_image_first else reversed(media)))


def _frames_of_chunk(
    images: dict[str, torch.Tensor], ids: torch.Tensor, row: tuple[ImageSpan, ...]
) -> dict[str, torch.Tensor]:
    """Return Gemma 4's images and frames, all of the small size, in the order of their tokens."""
    media = {
        IMAGE: ("pixel_values", "image_position_ids"),
        VIDEO: ("pixel_values_videos", "video_position_ids"),
    }
    left = {token: [iter(images[name]) for name in names] for token, names in media.items()}
    found = [[next(each) for each in left[int(ids[span.start])]] for span in row]
    return {
        name: torch.stack(each) for name, each in zip(media[IMAGE], zip(*found, strict=True), strict=True)
    }


def _same_size(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    if parts[0].dim() == 3:
        most = max(part.shape[1] for part in parts)
        filled = 0 if parts[0].is_floating_point() else -1
        return [
            torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[1]), value=filled) for part in parts
        ]
    if parts[0].dim() == 2:
        most = max(part.shape[1] for part in parts)
        return [torch.nn.functional.pad(part, (0, most - part.shape[1])) for part in parts]
    if parts[0].dim() == 5:
        most = max(part.shape[1] for part in parts)
        padding = (0,) * 7
        return [torch.nn.functional.pad(part, (*padding, most - part.shape[1])) for part in parts]
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
        found = [torch.from_numpy(positions(LENGTH, row)) for row in where]
        if any(each.is_floating_point() for each in found):
            found = [each.float() for each in found]
        batch["position_ids"] = torch.stack(found, 1)
    omni = reference.path.name.startswith(omni_reference.OMNI)
    taken = tuple(
        omni_reference.chunk_inputs(reference.images[row], row)
        if omni
        else of_chunk(reference.images[row], reference.input_ids[row], reference.places[row])
        for row in rows
    )
    if images := joined(taken):
        found = [torch.from_numpy(rows) for rows in batch_feature_rows([LENGTH] * len(where), where)]
        batch["attention_ends"] = torch.stack(
            [torch.from_numpy(attention_ends(LENGTH, row)) for row in where]
        )
        batch |= {"images": images, "feature_rows": torch.stack(found)}
    return batch
