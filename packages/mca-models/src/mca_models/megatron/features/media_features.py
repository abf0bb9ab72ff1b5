"""Features of the images and audio clips of a micro-batch, each computed by one of the ranks that need it.

The rows of images come first, then those of clips. All tensor and context ranks of the first stage need all features.
Images are distributed over these ranks, the largest first to the rank with the least load; each rank computes its
images, and all gather the features. In the backward pass a rank gets the gradients of its images' features, summed over
the ranks. Each rank's tokens hold a part of them; on tensor ranks without sequence parallelism each rank holds the full
gradient, and Megatron averages the vision model's gradients over those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.errors import McaError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.media import tile_order
from mca_models.megatron.types import HfModel, Upstream
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import AudioTower, VisionModel


@dataclass(frozen=True)
class MediaItem:
    """One image, one tile, or one audio clip.

    Args:
        arguments: Arguments of the vision model.
        load: Number of patches or frames to compute.
        rows: Number of rows of its features.
    """

    arguments: JsonObject
    load: int
    rows: int


@dataclass(frozen=True)
class _Medium:
    """Images or audio clips of a micro-batch.

    Args:
        arguments: Arguments of their tower; empty: there are none.
        run: Function that runs their tower.
        split: Function that splits the arguments by image or clip.
        trained: Parameters of their tower that get gradients.
    """

    arguments: JsonObject
    run: Callable[[HfModel, JsonObject], Tensor]
    split: Callable[[JsonObject, McaModelConfig], list[MediaItem]]
    trained: Sequence[torch.nn.Parameter]


def compute_image_features(
    vision: HfModel, images: JsonObject, config: McaModelConfig, trained: Sequence[torch.nn.Parameter]
) -> tuple[Tensor, list[Tensor]]:
    """Compute the features of all images and audio clips ``[rows, hidden]``, and those of inner layers.

    Collective over the tensor and context ranks, if there are several images or clips.

    Args:
        vision: The vision model.
        images: Its arguments by name.
        config: Configuration of the model.
        trained: Parameters of the vision model that get gradients.
    """
    found = [_compute_medium(vision, medium, config) for medium in _media(vision, images, config, trained)]
    parts = torch.cat(found).split(config.hidden_size, 1)
    return parts[0], list(parts[1:])


def _media(
    vision: HfModel, images: JsonObject, config: McaModelConfig, trained: Sequence[torch.nn.Parameter]
) -> list[_Medium]:
    """Return the media of a model, in the order of their rows."""
    family = get_family(config.model_type).vision
    assert family is not None, "a model with images has a vision model"
    if family.audio is None:
        return [_Medium(images, _run_vision, split_images, trained)]
    audio_tower = {
        parameter for name, parameter in vision.named_parameters() if name.startswith(family.audio.names)
    }
    clips = {name: images[name] for name in family.audio.inputs if name in images}
    if clips and (config.vision_fields or {}).get("audio_config") is None:
        raise McaError(
            f"this {config.model_type} model has no audio tower (audio_config); train it without audio"
        )
    run = partial(run_clips, config=config, audio=family.audio)
    if "vision_config" not in (config.vision_fields or {}):
        return [_Medium(clips, run, split_clips, trained)]
    pictures = {name: value for name, value in images.items() if name not in clips}
    return [
        _Medium(pictures, _run_vision, split_images, [each for each in trained if each not in audio_tower]),
        _Medium(clips, run, split_clips, [each for each in trained if each in audio_tower]),
    ]


def _compute_medium(vision: HfModel, medium: _Medium, config: McaModelConfig) -> Tensor:
    """Return ``[rows, hidden * (1 + inner layers)]``."""
    from megatron.core.parallel_state import get_tensor_and_context_parallel_group
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    if not medium.arguments:
        return empty_features(vision, config, medium.trained)
    group: ProcessGroup = get_tensor_and_context_parallel_group()
    separate = medium.split(medium.arguments, config) if group.size() > 1 else []
    if len(separate) < 2:
        return _with_inner_columns(medium.run(vision, medium.arguments), config)
    owners = assign_images([image.load for image in separate], group.size())
    local = [image for image, owner in zip(separate, owners, strict=True) if owner == group.rank()]
    if local:
        # each rank draws its own dropout; the shared random state stays equal on all ranks
        with get_cuda_rng_tracker().fork():
            mine = medium.run(vision, _concatenate([image.arguments for image in local]))
    else:
        mine = empty_features(vision, config, medium.trained)
    rows_by_rank = _feature_rows([image.rows for image in separate], owners, group.size(), mine.device)
    gathered: Tensor = _GatherFeatures.apply(_with_inner_columns(mine, config), rows_by_rank, group)
    return gathered


def _with_inner_columns(features: Tensor, config: McaModelConfig) -> Tensor:
    """Return ``features`` with zeros for the inner layers that their tower does not have."""
    width = config.hidden_size * (1 + given(config.vision).deepstack_layers)
    missing = width - features.shape[1]
    return torch.nn.functional.pad(features, (0, missing)) if missing else features


def assign_images(loads: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each image so that the loads are balanced."""
    busy, owners = [0] * ranks, [0] * len(loads)
    for number in sorted(range(len(loads)), key=lambda each: -loads[each]):
        owners[number] = busy.index(min(busy))
        busy[owners[number]] += loads[number]
    return owners


def split_images(images: JsonObject, config: McaModelConfig) -> list[MediaItem]:
    """Split the arguments of the vision tower by image, tile or frame."""
    pixels: Tensor = images["pixel_values"]
    vision = (config.vision_fields or {})["vision_config"]
    family = get_family(config.model_type).vision
    assert family is not None, "a model with images has a vision model"
    if (grids := images.get("image_grid_thw")) is not None:
        side = vision.get("spatial_merge_size", 2)
        merged, loads = prod(vision.get("merge_kernel_size") or (side, side)), grids.prod(1).tolist()
        kept = {"pixel_values": pixels, "image_grid_thw": grids}
        return _split(kept, loads, [load // merged for load in loads], loads)
    if (sizes := images.get("target_sizes")) is not None:
        assert family.tokens_of_size is not None, "the size of an image gives its features"
        loads, counts = (
            sizes.prod(1).tolist(),
            [family.tokens_of_size(config, *size) for size in sizes.tolist()],
        )
        return _split({"pixel_values": pixels, "target_sizes": sizes}, loads, counts, loads)
    if (sizes := images.get("image_sizes", images.get("spatial_shapes"))) is not None:
        together = images["batch_num_images"].tolist() if "batch_num_images" in images else [1] * len(sizes)
        counts = [
            _count_features(size, count, family, config)
            for size, count in zip(sizes.tolist(), together, strict=True)
        ]
        return _split(images, counts, counts)
    if (positions := images.get("image_position_ids")) is not None:
        token = 3 * (vision.get("patch_size", 16) * vision.get("pooling_kernel_size", 3)) ** 2
        counts = ((positions >= 0).all(-1).sum(-1) * pixels.shape[-1] // token).tolist()
        kept = {"pixel_values": pixels, "image_position_ids": positions}
        return _split(kept, [pixels.shape[1]] * len(pixels), counts)
    assert family.tokens_per_image is not None, "images have grids, sizes or a fixed number"
    length = family.tokens_per_image(config)
    if (tiled := images.get("grids")) is not None:
        orders = [tile_order(rows, columns) for rows, columns in tiled.tolist()]
        tiles = [order.count(None) for order in orders]
        counts = [len(order) + count * (length - 1) for order, count in zip(orders, tiles, strict=True)]
        return _split({"pixel_values": pixels, "grids": tiled}, tiles, counts, tiles)
    return _split({"pixel_values": pixels}, [1] * len(pixels), [length] * len(pixels))


def _count_features(size: tuple[int, int], images: int, family: VisionModel, config: McaModelConfig) -> int:
    """Return the features of an image of ``size``; for ``images`` see `_run_alone_and_together`."""
    if images < 1 and family.tokens_per_frame is not None:
        return 1 - images * family.tokens_per_frame(config)
    if images > 1 and family.tokens_together is not None:
        return family.tokens_together(config)
    assert family.tokens_of_size is not None, "the size of an image gives its features"
    return family.tokens_of_size(config, *size)


def _split(
    arguments: JsonObject, loads: Sequence[int], rows: Sequence[int], lengths: Sequence[int] | int = 1
) -> list[MediaItem]:
    """Return an item for each row of ``arguments``; ``lengths``: rows of ``pixel_values`` of each."""
    parts = [each.split(lengths if name == "pixel_values" else 1) for name, each in arguments.items()]
    return [
        MediaItem(dict(zip(arguments, own, strict=True)), load, count)
        for *own, load, count in zip(*parts, loads, rows, strict=True)
    ]


def split_clips(clips: JsonObject, config: McaModelConfig) -> list[MediaItem]:
    """Split the arguments of the audio tower by clip."""
    family = get_family(config.model_type).vision
    assert family is not None and family.audio is not None, "a model with audio has an audio tower"
    audio, features = family.audio, clips["input_features"]
    frames = [features.shape[-1]] * len(features) if audio.mask is None else clips[audio.mask].sum(1).tolist()
    counts = [audio.tokens(config, int(count)) for count in frames]
    return _split(clips, [features.shape[-1]] * len(counts), counts)


def _concatenate(arguments: Sequence[JsonObject]) -> JsonObject:
    return {name: torch.cat([each[name] for each in arguments]) for name in arguments[0]}


def _run_vision(vision: HfModel, images: JsonObject) -> Tensor:
    """Return ``[rows, hidden * (1 + inner layers)]``."""
    if "grids" in images:
        return _run_marked(vision, images)
    if "batch_num_images" in images:
        return _run_alone_and_together(vision, images)
    if "target_sizes" in images:
        images = {**images, "pixel_values": join_patches(images["pixel_values"])}
    output = vision.get_image_features(**images, return_dict=True)
    inner = getattr(output, "deepstack_features", None) or ()
    features = output.pooler_output
    if features is None:  # Llama 4 projects them in its own forward pass
        features = vision.multi_modal_projector(output.last_hidden_state)
    return torch.cat([_flatten(each) for each in (features, *inner)], 1)


def join_patches(patches: Tensor) -> Tensor:
    """Return patches ``[patches, channels, side, side]`` next to each other: ``[1, channels, side, all columns]``."""
    return patches.permute(1, 2, 0, 3).flatten(2)[None]


def split_patches(pixels: Tensor) -> Tensor:
    """Return the inverse of `join_patches`, which image processors write."""
    patches: Tensor = pixels[0].unflatten(2, (-1, pixels.shape[2]))
    return patches.permute(2, 0, 1, 3)


def _run_marked(vision: HfModel, images: JsonObject) -> Tensor:
    """Return the features of tiles and of the marks between them, in the order of their tokens."""
    output = vision.get_image_features(images["pixel_values"], return_dict=True)
    tiles, marks = iter(output.pooler_output), output.visual_indicator_features
    orders = [tile_order(rows, columns) for rows, columns in images["grids"].tolist()]
    return torch.cat(
        [next(tiles) if mark is None else marks[mark : mark + 1] for order in orders for mark in order]
    )


def _run_alone_and_together(vision: HfModel, images: JsonObject) -> Tensor:
    """Return the features of images and videos, which ``batch_num_images`` tells apart.

    1 is the only image of its sequence, a larger number one of several images, and a negative one the frames of a
    video.
    """
    counts, found = images["batch_num_images"].tolist(), dict[int, Tensor]()
    pixels, sizes = images["pixel_values"], images["image_sizes"]
    for number, frames in enumerate(counts):
        if frames < 1:
            output = vision.get_video_features(pixels[number : number + 1, :-frames], return_dict=True)
            found[number] = output.pooler_output[0]
    single = [number for number, count in enumerate(counts) if count == 1]
    together = [number for number, count in enumerate(counts) if count > 1]
    for numbers in filter(None, (single, together)):
        # one of several images goes in twice, so that the tower does not take it for a lone one
        taken = numbers if numbers is single or len(numbers) > 1 else numbers * 2
        output = vision.get_image_features(
            pixel_values=pixels[taken],
            image_sizes=sizes[taken],
            batch_num_images=[1] * len(taken) if numbers is single else [len(taken)],
            return_dict=True,
        )
        found |= dict(zip(numbers, output.pooler_output, strict=False))
    return torch.cat([found[number] for number in range(len(counts))])


def _flatten(features: Tensor | Sequence[Tensor]) -> Tensor:
    whole = (
        features if isinstance(features, Tensor) else torch.cat([each.flatten(0, -2) for each in features])
    )
    return whole.flatten(0, -2)


def empty_features(vision: HfModel, config: McaModelConfig, trained: Sequence[torch.nn.Parameter]) -> Tensor:
    """Return features without images ``[0, hidden * (1 + inner layers)]`` that depend on ``trained``.

    Megatron reduces the gradients of a bucket once all of them are ready, and hangs if some never are. Therefore a rank
    without images must produce gradients too, at the same point of the backward pass as other ranks.
    """
    parameter: Tensor = next(vision.parameters())
    none = parameter.new_zeros(0, config.hidden_size * (1 + given(config.vision).deepstack_layers))
    if not (trained and torch.is_grad_enabled()):
        return none
    connected: Tensor = ZeroGradients.apply(none, *trained)
    return connected


def _feature_rows(
    rows: Sequence[int], owners: Sequence[int], ranks: int, device: torch.device
) -> list[Tensor]:
    """Return the rows of each rank's features, made on ``device`` to avoid a synchronisation."""
    found: list[list[Tensor]] = [[] for _ in range(ranks)]
    start = 0
    for count, owner in zip(rows, owners, strict=True):
        found[owner].append(torch.arange(start, start + count, device=device))
        start += count
    return [torch.cat(some) if some else torch.zeros(0, dtype=torch.long, device=device) for some in found]


class _GatherFeatures(torch.autograd.Function):
    """All ranks' features, gathered from this rank's."""

    @staticmethod
    def forward(ctx: Upstream, local: Tensor, rows_by_rank: list[Tensor], group: ProcessGroup) -> Tensor:
        ctx.group, ctx.local = group, rows_by_rank[group.rank()]
        most = max(len(some) for some in rows_by_rank)
        padded = local.new_zeros(most, local.shape[1])
        padded[: len(local)] = local
        everyone = local.new_empty(most * group.size(), local.shape[1])
        torch.distributed.all_gather_into_tensor(everyone, padded, group=group)
        features = local.new_empty(sum(len(some) for some in rows_by_rank), local.shape[1])
        for rank, some in enumerate(rows_by_rank):
            features[some] = everyone[rank * most : rank * most + len(some)]
        return features

    @staticmethod
    def backward(ctx: Upstream, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = gradient.contiguous()
        torch.distributed.all_reduce(whole, group=ctx.group)
        return whole[ctx.local], None, None


class ZeroGradients(torch.autograd.Function):
    """Identity of its first argument; the others get gradients of zero."""

    @staticmethod
    def forward(ctx: Upstream, output: Tensor, *parameters: Tensor) -> Tensor:
        """Return a view of ``output``."""
        ctx.zeros = [each.new_zeros(()).expand(each.shape) for each in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Upstream, gradient: Tensor) -> tuple[Tensor, ...]:
        """Pass ``gradient`` on, and return zeros for the parameters."""
        return gradient, *ctx.zeros


def run_audio(model: HfModel, clips: JsonObject) -> Tensor:
    """Return the features of all clips, one after the other: ``[rows, hidden]``.

    Args:
        model: Transformers' model without its text model.
        clips: Arguments of the audio tower by name.
    """
    if not hasattr(model, "get_audio_features"):
        return _run_masked(model, **clips)
    output = model.get_audio_features(**clips, return_dict=True)
    features = output.pooler_output if output.get("pooler_output") is not None else output.last_hidden_state
    if (inside := output.get("attention_mask")) is not None:
        kept: Tensor = features[inside]
        return kept
    flat: Tensor = features.flatten(0, -2)
    return flat


def run_clips(model: HfModel, clips: JsonObject, config: McaModelConfig, audio: AudioTower) -> Tensor:
    """Return the features of all clips, with those of clips shorter than a chunk as if they were alone.

    Args:
        model: Transformers' model without its text model.
        clips: Arguments of the audio tower by name.
        config: Configuration of the model.
        audio: Its audio tower.
    """
    if audio.chunk is None or audio.mask is None:
        return run_audio(model, clips)
    frames, chunk = clips[audio.mask].sum(1).tolist(), audio.chunk(config)
    groups = [[number] for number, count in enumerate(frames) if count < chunk]
    if full := [number for number, count in enumerate(frames) if count >= chunk]:
        groups.append(full)
    found: dict[int, Tensor] = {}
    for group in groups:
        made = run_audio(model, {name: each[group] for name, each in clips.items()})
        rows = [audio.tokens(config, frames[number]) for number in group]
        found |= zip(group, made.split(rows), strict=True)
    return torch.cat([found[number] for number in range(len(frames))])


def _run_masked(model: HfModel, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
    """Return what ``Qwen2AudioModel`` computes within its own forward pass.

    Args:
        model: The model.
        input_features: Mel spectrograms, ``[clips, mels, frames]``.
        feature_attention_mask: Frames of each clip, ``[clips, frames]``.
    """
    from transformers.masking_utils import create_bidirectional_mask

    tower = model.audio_tower
    inner, rows = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    length = (input_features.shape[-1] - 2) // 2 + 1
    inside = torch.arange(length, device=inner.device) < inner[:, None]
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(*inside.shape, 1),
        attention_mask=inside.long(),
    )
    features: Tensor = model.multi_modal_projector(
        tower(input_features, attention_mask=mask).last_hidden_state
    )
    return features[torch.arange(features.shape[1], device=rows.device) < rows[:, None]]
