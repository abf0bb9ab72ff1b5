"""Images and videos that a plan assumes per sequence, and the activation memory of the vision tower.

Towers are classes of transformers, replicated on every rank of the first stage. The lines are taken from dry runs.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mca_config.errors import UsageError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.media import tile_order
from mca_models.templates import get_family
from mca_models.templates.parts.layer_costs import SINGLE, SavedTensor
from mca_models.templates.parts.llava import count_tiles
from mca_train.plan.sizes import Sizes

if TYPE_CHECKING:
    from mca_models.templates.parts.vision_language import Part

PIXELS = 448
"""Default side of an image in a plan."""
FRAMES = 32
"""Default number of frames of a video in a plan."""
FRAME_TOKENS = 70
"""Tokens of a frame of Gemma 4, by default of its video processor."""
COUNTED_SIDE = 64
"""Patches along a side of an image whose features are counted, a multiple of those that towers merge."""
FRAME_WORDS = 10
"""Tokens of the time of a frame and of the marks around it, which most families write."""
Form = Literal[
    "patches",
    "tiles",
    "sizes",
    "pooled",
    "lone_tiles",
    "marked_tiles",
    "joined_tiles",
    "shapes",
    "loose_patches",
]
"""Input of a tower: a grid of patches, images of one size, images with their sizes, padded patches of images, the same
with their rows and columns, or the same without padding (``loose_patches``); or tiles: one for each image, with marks
that have features, or joined with their sizes."""
ImageLayout = tuple[Form, int | None, int]
"""Form, fixed side in pixels (None: any), and patches along a side of a token."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Elements that a tower layer saves per patch.

    Args:
        attention: Multiple of the hidden size: q, k, v as projected, rotated q and k, output, and merged heads.
        inner: Multiple of the MLP size.
        single: Multiple of the hidden size in fp32, for both norms; their inputs and outputs are saved too.
    """

    attention: int = 7
    inner: int = 2
    single: int = 0


_GATED = _Block(inner=4, single=2)
_TILES: dict[str, Form] = {"row_column_tiles": "lone_tiles", "word_marks": "marked_tiles"}
"""Forms of the input of towers, by the kind of image tokens."""
_BLOCKS = {
    "qwen2_5_vl_vision": _GATED,
    "qwen2_5_omni_vision_encoder": _GATED,
    "glm4v_vision": _GATED,
    "exaone4_5_vision": _GATED,
    "glm4v_moe_vision": _GATED,
    "glm_ocr_vision": _Block(inner=4, single=4),
    "qwen2_vl_vision": _Block(inner=3),  # an approximate GELU that saves its factors
    "clip_vision_model": _Block(attention=4, inner=3),  # as SigLIP, and a sigmoid in the activation
    "siglip_vision_model": _Block(attention=4),  # no RoPE, and no copy of the merged heads
    "internvl_vision": _Block(attention=6),  # the same, with layer scale after attention and MLP
    "qianfan_ocr_vision": _Block(attention=6),
    "got_ocr2_vision": _Block(attention=6),  # and scores
    "llama4_vision_model": _Block(attention=4),  # RoPE of complex numbers, which saves no copy
    "pixtral": _Block(attention=4, inner=4, single=2),
    "lfm3_vl_vision": _GATED,  # convolutions with their gates save as much as attention
    "gemma4_vision": _Block(inner=4, single=13),  # four norms, and those of q, k and v
    "idefics3_vision": _Block(attention=4),  # SigLIP on patches of images of any size
    "smolvlm_vision": _Block(attention=4),
    "siglip2_vision_model": _Block(attention=4),
    "minicpmv4_6_vision": _Block(attention=4),
    "ovis2_vision": _Block(attention=4, inner=4, single=2),
}
"""Towers that differ from Qwen3-VL's."""


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """Sizes of a vision tower."""

    kind: str
    form: Form
    depth: int
    hidden: int
    inner: int
    features: int
    """Channels of the features for the text model."""
    merge: int
    """Patches along a side of one token."""
    patch: int
    """Pixels along a side."""
    values: int
    """Elements per patch."""
    projectors: int
    """Number of projectors: one for the last layer, and one per DeepStack layer."""
    side: int | None
    """Pixels along a side of every image or tile; None: any."""
    temporal: int = 1
    """Frames of a video that are merged into one."""
    tile: int = 0
    """Pixels along a side of a tile, of which an image of any size has several; 0: it has none."""
    visual_vocab_size: int = 0
    """Rows of the visual embedding table, of which a feature is a mixture; 0: there is none."""
    merges_after: int = 0
    """Layers before the tower merges two by two patches into one, after attention among these; 0: it does not."""
    score_heads: int = 0
    """Attention heads whose scores are in memory; 0: there are none."""
    score_keys: tuple[float, ...] = ()
    """Keys of a patch in each layer with such scores."""

    @classmethod
    def from_config(cls, config: McaModelConfig) -> "VisionTower | None":
        """Return the tower of a model; None: it has none, or an unknown one."""
        if config.vision_fields is None or "vision_config" not in config.vision_fields:
            return None
        sizes = _sizes(config.model_type, config.vision_fields["vision_config"])
        if sizes["model_type"] in ("gemma4_vision", "gemma4_unified_vision"):
            return cls._pooled(sizes, config.vision_fields.get("vision_soft_tokens_per_image", 280))
        named = "depth" in sizes or sizes["model_type"] in _BLOCKS
        if named and {"spatial_merge_size", "temporal_patch_size"} <= sizes.keys():
            pictures: ImageLayout = "patches", None, sizes["spatial_merge_size"]
        elif "merge_kernel_size" in sizes:
            pictures = "patches", None, _square_side(sizes["merge_kernel_size"])
        elif sizes["model_type"] in _BLOCKS:
            pictures = _image_layout(config, config.vision_fields, sizes)
        else:
            return None
        form, side, merge = pictures
        tile = _square_side(sizes["image_size"]) if form == "joined_tiles" else 0
        hidden, patch = sizes.get("embed_dim") or sizes["hidden_size"], _square_side(sizes["patch_size"])
        keeps_scores = sizes["model_type"] == "got_ocr2_vision"
        return cls(
            kind=sizes["model_type"],
            form=form,
            depth=sizes.get("depth") or sizes["num_hidden_layers"],
            hidden=hidden,
            inner=sizes.get("intermediate_size") or sizes.get("mlp_dim") or hidden * sizes["mlp_ratio"],
            features=sizes.get("out_hidden_size") or sizes["hidden_size"],
            merge=merge,
            patch=patch,
            values=sizes.get("in_channels", 3) * sizes.get("temporal_patch_size", 1) * patch**2,
            projectors=1 + given(config.vision).deepstack_layers,
            side=side,
            temporal=sizes.get("temporal_patch_size", 1),
            tile=tile,
            visual_vocab_size=sizes["vocab_size"] if form == "marked_tiles" else 0,
            merges_after=_merges_after(config, sizes) if form == "loose_patches" else 0,
            score_heads=sizes["num_attention_heads"] if keeps_scores else 0,
            score_keys=_score_keys(sizes) if keeps_scores else (),
        )

    @classmethod
    def _pooled(cls, sizes: Values, tokens: int) -> "VisionTower":
        """Return the tower of Gemma 4, whose processor makes images as large as their ``tokens`` allow."""
        pool, patch = sizes["pooling_kernel_size"], sizes["patch_size"]
        merge = pool if "num_hidden_layers" in sizes else 1  # without a tower, patches are merged before
        hidden = sizes.get("hidden_size") or sizes["mm_embed_dim"]
        side = patch * pool // merge
        return cls(
            kind=sizes["model_type"],
            form="pooled",
            depth=sizes.get("num_hidden_layers", 0),
            hidden=hidden,
            inner=sizes.get("intermediate_size", 0),
            features=hidden,
            merge=merge,
            patch=side,
            values=3 * side**2,
            projectors=1,
            side=isqrt(tokens) * patch * pool,
        )


def _sizes(model_type: str, vision: Values) -> Values:
    """Return the tower's configuration with its defaults."""
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[model_type](vision_config=copy.deepcopy(dict(vision)))
    found: Values = whole.vision_config.to_dict()
    return found


def _image_layout(config: McaModelConfig, vision: Values, sizes: Values) -> ImageLayout:
    """Return the image layout of towers that take full images."""
    if sizes["model_type"] == "pixtral":
        return "sizes", None, vision.get("spatial_merge_size", 2)
    family = get_family(config.model_type).vision
    assert family is not None, "a tower belongs to a family with images"
    if family.image_tokens == "thumbnail_tiles":
        return "shapes", None, vision.get("downsample_factor", 2)
    if family.image_tokens == "numbered_slices" and family.tokens_of_size is not None:
        return (
            "loose_patches",
            None,
            isqrt(COUNTED_SIDE**2 // family.tokens_of_size(config, COUNTED_SIDE, COUNTED_SIDE)),
        )
    if family.image_tokens == "joined_tiles":
        return "joined_tiles", None, 1
    side = _square_side(sizes["image_size"])
    if sizes["model_type"] == "got_ocr2_vision":  # its convolutions merge patches, see `_extent`
        return "tiles", side, 1
    if sizes["model_type"] in ("internvl_vision", "qianfan_ocr_vision"):
        return "tiles", side, int(1 / vision.get("downsample_ratio", 0.5))
    assert family.tokens_per_image is not None, "such a tower gives a fixed number of tokens"
    tokens = family.tokens_per_image(config)
    return (
        _TILES.get(family.image_tokens or "", "tiles"),
        side,
        max(side // _square_side(sizes["patch_size"]) // isqrt(tokens), 1),
    )


def _merges_after(config: McaModelConfig, sizes: Values) -> int:
    """Return the layers of a tower of MiniCPM-V before it merges windows; 0: it does not."""
    family = get_family(config.model_type).vision
    merges = family is not None and not family.unused(config)
    return int(sizes["insert_layer_id"]) + 1 if merges else 0


def _score_keys(sizes: Values) -> tuple[float, ...]:
    """Return the keys of a patch in each layer of a SAM tower, whose windows are padded to squares."""
    side = _square_side(sizes["image_size"]) // _square_side(sizes["patch_size"])
    window = sizes["window_size"] or side  # 0: no windows
    padded = -(-side // window) * window
    inside = (window * padded / side) ** 2
    everywhere = sizes["global_attn_indexes"]
    return tuple(side**2 if i in everywhere else inside for i in range(sizes["num_hidden_layers"]))


def _square_side(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


@dataclass(frozen=True)
class Extent:
    """Tokens and tiles of one image, or of a video whose frames are tiles, where they do not follow from its side.

    Args:
        tokens: Number of tokens.
        tiles: Number of tiles.
        sizes: Rows and columns of the patches of each tile; empty: those of the tower.
    """

    tokens: int
    tiles: int = 1
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of one size in each sequence, or the frames of videos, which towers compute as images.

    Args:
        tower: Vision tower.
        count: Images per sequence.
        pixels: Side in pixels, rounded as image processors do.
        trained: Trained parts of the model.
        extent: Tokens and tiles of each; None: a square of merged patches.
        videos: Number of videos whose frames they are, and frames of each that the model sees; None: they are images.
        num_text_tokens: Tokens of text next to each.
    """

    tower: VisionTower
    count: int
    pixels: int
    trained: "frozenset[Part]"
    extent: Extent | None = None
    videos: tuple[int, int] | None = None
    num_text_tokens: int = 1
    has_image_count: bool = False
    """The tower takes the number of images in each sequence."""

    @property
    def length(self) -> int:
        """Tokens of a sequence that they and the text next to them take."""
        return self.count * (self.tokens + self.num_text_tokens)

    @property
    def side(self) -> int:
        """Tokens along the side of an image."""
        return max(round(self.pixels / (self.tower.patch * self.tower.merge)), 1)

    @property
    def tokens(self) -> int:
        """Tokens of one image."""
        return self.side**2 if self.extent is None else self.extent.tokens

    @property
    def patches(self) -> int:
        """Patches of the images of one sequence."""
        if self.extent is not None and self.extent.sizes:
            return self.count * sum(rows * columns for rows, columns in self.extent.sizes)
        return self.count * (1 if self.extent is None else self.extent.tiles) * int(self._attended)

    @property
    def _attended(self) -> float:
        """Patches of an image, or of a tile, which attend to each other: their mean over all patches."""
        tower = self.tower
        if self.extent is not None and self.extent.sizes:
            areas = [rows * columns for rows, columns in self.extent.sizes]
            return sum(area**2 for area in areas) / sum(areas)
        return (tower.tile // tower.patch) ** 2 if tower.tile else self.side**2 * tower.merge**2

    def flops(self, sequences: int) -> float:
        """Return the forward FLOPs for ``sequences``: GEMMs, attention within images, and projectors."""
        tower, patches = self.tower, sequences * self.patches
        merged = tower.hidden * tower.merge**2 / self._patches_per_projected
        factors = 3 if _BLOCKS.get(tower.kind, _Block()).inner == _GATED.inner else 2
        layer: float = 4 * tower.hidden**2 + factors * tower.hidden * tower.inner
        keys = sum(tower.score_keys) / tower.depth if tower.score_keys else self._attended
        scores = 2 * tower.hidden * keys  # and their products with values
        before = tower.merges_after or tower.depth
        layers = before * (layer + scores) + (tower.depth - before) * (layer + scores / 4) / 4
        if tower.merges_after:
            layers += 4 * tower.hidden**2 + 5 * tower.hidden * tower.inner
        projected = (
            1.0 * tower.projectors * (merged + tower.features) * tower.hidden / self._patches_per_projected
        )
        projected += tower.visual_vocab_size * (tower.hidden + tower.features / tower.merge**2)
        return 2.0 * patches * (layers + tower.values * tower.hidden + projected)

    def __str__(self) -> str:
        trained = "trained" if "vision" in self.trained else "frozen"
        if self.videos is not None:
            number, frames = self.videos
            return (
                f"{number} of {frames} frames of {self.pixels} x {self.pixels} pixels in each "
                f"sequence, {self.count * self.tokens} tokens, {trained} tower; --videos N, --video_frames FRAMES, "
                "--image_size PIXELS"
            )
        return (
            f"{self.count} of {self.pixels} x {self.pixels} pixels in each sequence, {self.tokens} tokens each, "
            f"{trained} tower; --images N, --image_size PIXELS"
        )

    def document(self) -> JsonObject:
        """Return their part of the JSON object of a plan."""
        if self.videos is None:
            return {"in_each_sequence": self.count, "pixels": self.pixels, "tokens_of_each": self.tokens}
        number, frames = self.videos
        return {"in_each_sequence": number, "frames": frames, "tokens": self.count * self.tokens}

    def lines(self, sizes: Sizes) -> list[SavedTensor]:
        """Return the tensors that a micro-batch's images save for the backward pass."""
        tower, patches = self.tower, float(sizes.sequences * self.patches)
        where = f"transformers: {tower.kind}"
        merged = patches / self._patches_per_projected * tower.hidden * sizes.width
        found = []
        if "vision" in self.trained:
            kept = self._layers * self._block(sizes)
            if tower.merges_after:
                kept += self._merger(sizes)
            scores = patches * tower.score_heads * sum(tower.score_keys)
            kept += scores * (SINGLE + sizes.width)  # softmax in fp32, and cast
            if tower.form == "sizes":  # mask of the patches of each image
                kept += patches**2 * sizes.width
            found = [SavedTensor("vision tower", kept, where)]
            found.append(SavedTensor("patches", patches * tower.values * sizes.width, where))
        if self.trained & {"vision", "projector"}:
            found.append(SavedTensor("projector", 4 * tower.projectors * merged, where))
            if tower.visual_vocab_size:
                mixtures = patches / tower.merge**2 * tower.visual_vocab_size * (sizes.width + SINGLE)
                found.append(SavedTensor("visual words", mixtures, where))
        return found

    def _block(self, sizes: Sizes) -> float:
        tower, patches, width = self.tower, float(sizes.sequences * self.patches), sizes.width
        block = _BLOCKS.get(tower.kind, _Block())
        norms = (4 * width + block.single * SINGLE) * tower.hidden
        return patches * (block.attention * tower.hidden * width + norms + block.inner * tower.inner * width)

    @property
    def _patches_per_projected(self) -> int:
        """Patches for one that the projector gets."""
        return 4 if self.tower.merges_after else 1

    @property
    def _layers(self) -> float:
        """Layers that all patches go through, with those behind a merger counted as quarters."""
        before = self.tower.merges_after or self.tower.depth
        return before + (self.tower.depth - before) / 4

    def _merger(self, sizes: Sizes) -> float:
        """Return the bytes that attention within windows and the MLP over each of these save."""
        tower, patches, width = self.tower, float(sizes.sequences * self.patches), sizes.width
        return patches * width * (10 * tower.hidden + 2 * tower.inner)

    def running(self, sizes: Sizes) -> float:
        """Return the peak bytes of the tower's forward pass if it saves nothing."""
        tower, patches = self.tower, float(sizes.sequences * self.patches)
        widest: float = max(4 * tower.inner, 6 * tower.hidden) * sizes.width
        widest += tower.score_heads * max(tower.score_keys, default=0) * (2 * SINGLE + 2 * sizes.width)
        return patches * (widest + 2 * tower.hidden * sizes.width)


def plan_images(
    config: McaModelConfig,
    trained: "frozenset[Part]",
    seq_length: int,
    *,
    takes: bool,
    count: int | None = None,
    pixels: int | None = None,
    folder: Path | None = None,
) -> Images | None:
    """Return the images of each sequence in a plan.

    Args:
        config: Model configuration.
        trained: Parts of the model.
        seq_length: Tokens of a sequence.
        takes: The task supports images.
        count: Requested number; None: one, if the model and the task support images and it fits.
        pixels: Requested side; None: `PIXELS`.
        folder: Directory of the model, with the image processor that slices images; None: its defaults.

    Raises:
        UsageError: The requested images are not possible.
    """
    tower = VisionTower.from_config(config) if takes else None
    if tower is None:
        if count or pixels:
            raise UsageError(
                f"--images: a {config.model_type} model has no supported vision tower, or this kind of "
                "run supports no images; remove --images"
            )
        return None
    _require_side(config, tower, pixels)
    number, size = 1 if count is None else count, pixels or tower.side or PIXELS
    images = Images(
        tower=tower,
        count=number,
        pixels=size,
        trained=trained,
        extent=_extent(config, tower, size, number, folder),
        has_image_count=_has_image_count(config),
    )
    if images.length > seq_length:
        if count is None and pixels is None:
            return None
        raise UsageError(
            f"--images {images.count}: they are {images.length} tokens, and seq_length is {seq_length}; use fewer or "
            "smaller images (--image_size), or a larger seq_length"
        )
    return images if images.count else None


def _require_side(config: McaModelConfig, tower: VisionTower, pixels: int | None) -> None:
    """Raise if images or frames cannot have ``pixels``."""
    if tower.side and pixels not in (None, tower.side):
        raise UsageError(
            f"--image_size {pixels}: images of {config.model_type}, their tiles, and frames are all of {tower.side} "
            "pixels; leave it out, and count tiles by --images"
        )


def _has_image_count(config: McaModelConfig) -> bool:
    family = get_family(config.model_type).vision
    return family is not None and family.tokens_together is not None


def _extent(
    config: McaModelConfig, tower: VisionTower, pixels: int, count: int, folder: Path | None = None
) -> Extent | None:
    """Return tokens and tiles of each of ``count`` images in a sequence."""
    family = get_family(config.model_type).vision
    assert family is not None, "a tower belongs to a family with images"
    if tower.form == "marked_tiles" and family.tokens_per_image is not None:
        order = tile_order(1, 1)
        return Extent(len(order) - 1 + family.tokens_per_image(config))
    if tower.score_keys and family.tokens_per_image is not None:
        return Extent(family.tokens_per_image(config))
    if tower.form == "loose_patches":
        assert family.tokens_of_size is not None, "it counts the features of a size"
        sizes = slice_sizes(config, tower.patch, pixels, folder)
        return Extent(sum(family.tokens_of_size(config, *each) for each in sizes), len(sizes), tuple(sizes))
    if tower.form != "joined_tiles" or family.tokens_of_size is None:
        return None
    if count > 1 and family.tokens_together is not None:
        return Extent(family.tokens_together(config))
    return Extent(family.tokens_of_size(config, pixels, pixels), count_tiles(config, pixels, pixels))


def plan_videos(
    config: McaModelConfig,
    trained: "frozenset[Part]",
    room: int,
    *,
    takes: bool,
    count: int | None = None,
    frames: int | None = None,
    pixels: int | None = None,
    with_images: bool = False,
) -> Images | None:
    """Return the videos of each sequence in a plan, as images.

    Args:
        config: Model configuration.
        trained: Parts of the model.
        room: Tokens of a sequence without images.
        takes: The task supports media.
        count: Requested number; None: none, or one if frames are requested.
        frames: Requested frames of each that the model sees; None: `FRAMES`.
        pixels: Requested side of a frame; None: `PIXELS`, or what the model takes.
        with_images: There are images of ``pixels`` too.

    Raises:
        UsageError: The requested videos are not possible.
    """
    if not count and frames is None:
        return None
    family, tower = get_family(config.model_type).vision, VisionTower.from_config(config) if takes else None
    if tower is None or family is None or family.video_tokens is None:
        raise UsageError(
            f"--videos: a {config.model_type} model takes no videos, or this kind of run supports none; remove --videos"
        )
    _require_side(config, tower, pixels)
    pooled = isqrt(FRAME_TOKENS) * tower.patch * tower.merge if tower.form == "pooled" else None
    side = pooled or (tower.tile if family.tokens_per_frame is not None else None)  # None: that of images
    if side and pixels not in (None, side) and not with_images:
        raise UsageError(
            f"--image_size {pixels}: frames of {config.model_type} are all of {side} pixels; leave it out"
        )
    number, num_frames = 1 if count is None else count, FRAMES if frames is None else frames
    frame_side = side or pixels or tower.side or PIXELS
    made = Images(
        tower=tower,
        count=number * -(-num_frames // tower.temporal),
        pixels=frame_side,
        trained=trained,
        videos=(number, num_frames),
        extent=_extent(config, tower, frame_side, number) if tower.form == "loose_patches" else None,
        num_text_tokens=1 if family.video_tokens == "together" else FRAME_WORDS,
        has_image_count=_has_image_count(config),
    )
    if family.tokens_per_frame is not None:
        tokens = num_frames * family.tokens_per_frame(config) + 1
        made = replace(made, count=number, extent=Extent(tokens, num_frames), num_text_tokens=1)
    if made.length > room:
        raise UsageError(
            f"--videos {number}: they are {made.length} tokens, and a sequence has {room} without images; use fewer "
            "or smaller frames (--video_frames, --image_size), or a larger seq_length"
        )
    return made if number else None


def slice_sizes(
    config: McaModelConfig, patch: int, pixels: int, folder: Path | None = None
) -> list[tuple[int, int]]:
    """Return the rows and columns of patches of the resized image and of each of its slices.

    Args:
        config: Model configuration.
        patch: Side of a patch in pixels.
        pixels: Side of the image.
        folder: Directory of the image processor; None, or without one: the processor's defaults.
    """
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    names = ("preprocessor_config.json", "processor_config.json")
    if folder is not None and any((folder / name).is_file() for name in names):
        processor = MiniCPMV4_6ImageProcessorPil.from_pretrained(folder)
    else:
        processor = MiniCPMV4_6ImageProcessorPil()
    size, slices = (pixels, pixels), None
    options = {"scale_resolution": processor.scale_resolution, "patch_size": patch}
    options["downsample_mode"] = (config.vision_fields or {}).get("downsample_mode", "16x")
    if processor.slice_mode:
        slices = processor.get_sliced_grid(size, processor.max_slice_nums, processor.scale_resolution)
    high, wide = processor.find_best_resize(size, **options, allow_upscale=slices is None)
    sizes = [(high // patch, wide // patch)]
    if slices is not None:
        rows, columns = slices
        high, wide = processor.get_refine_size(size, slices, **options, allow_upscale=True)
        sizes += [(high // rows // patch, wide // columns // patch)] * (rows * columns)
    return sizes
