"""Images that a plan assumes in each sequence, and what a vision tower keeps of them.

Towers are transformers' own classes and whole on every rank of the first stage. The lines were read off the dry run.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Literal

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_train.plan.sizes import SINGLE, Line, Sizes

if TYPE_CHECKING:
    from mca_train.config.parts import Part

PIXELS = 448
"""The default side of an image in a plan."""
Form = Literal["patches", "tiles", "sizes"]
"""What a tower takes: a grid of patches, images of one size, or images with their sizes."""
Pictures = tuple[Form, int | None, int]
"""Form, pixels along a side if that is always the same, and patches along a side of a token."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Numbers that a layer of a tower keeps of each patch.

    Args:
        attention: Times the hidden size: q, k, v as projected, q and k rotated, output, and joined.
        inner: Times the size inside the MLP.
        single: Of both norms, times the hidden size, in fp32; inputs and outputs of both are kept too.
    """

    attention: int = 7
    inner: int = 2
    single: int = 0


_GATED = _Block(inner=4, single=2)
_BLOCKS = {
    "qwen2_5_vl_vision": _GATED,
    "glm4v_vision": _GATED,
    "glm4v_moe_vision": _GATED,
    "qwen2_vl_vision": _Block(inner=3),  # an approximate GELU that keeps its factors
    "siglip_vision_model": _Block(attention=4),  # not rotated, and joined as it comes
    "internvl_vision": _Block(attention=6),  # the same, and what is scaled of attention and MLP
    "pixtral": _Block(attention=4, inner=4, single=2),
}
"""Of other towers than Qwen3-VL's."""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The sizes of a vision tower."""

    kind: str
    form: Form
    depth: int
    hidden: int
    inner: int
    features: int
    """Channels of what it gives the text."""
    merge: int
    """Patches along a side of what becomes one token."""
    patch: int
    """Pixels along a side."""
    values: int
    """Numbers of a patch."""
    projectors: int
    """What features come from: the tower's end, and those of its layers that are added inside the text model."""
    side: int | None
    """Pixels along a side of every image or tile; None: any."""

    @classmethod
    def of(cls, config: McaModelConfig) -> "Tower | None":
        """That of a model; None: it has none, or one that is not known."""
        if config.vision is None or "vision_config" not in config.vision:
            return None
        sizes = _sizes(config.model_type, config.vision["vision_config"])
        if {"depth", "spatial_merge_size", "temporal_patch_size"} <= sizes.keys():
            pictures: Pictures = "patches", None, sizes["spatial_merge_size"]
        elif sizes["model_type"] in _BLOCKS:
            pictures = _of_pictures(config.vision, sizes)
        else:
            return None
        form, side, merge = pictures
        hidden, patch = sizes.get("embed_dim") or sizes["hidden_size"], _one(sizes["patch_size"])
        return cls(
            kind=sizes["model_type"],
            form=form,
            depth=sizes.get("depth") or sizes["num_hidden_layers"],
            hidden=hidden,
            inner=sizes.get("intermediate_size") or hidden * sizes["mlp_ratio"],
            features=sizes.get("out_hidden_size") or sizes["hidden_size"],
            merge=merge,
            patch=patch,
            values=sizes.get("in_channels", 3) * sizes.get("temporal_patch_size", 1) * patch**2,
            projectors=1 + config.deepstack_layers,
            side=side,
        )


def _sizes(model_type: str, vision: Values) -> Values:
    """A tower's configuration, with what it does not say."""
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[model_type](vision_config=copy.deepcopy(dict(vision)))
    found: Values = whole.vision_config.to_dict()
    return found


def _of_pictures(vision: Values, sizes: Values) -> Pictures:
    """Of towers that take whole images."""
    if sizes["model_type"] == "pixtral":
        return "sizes", None, vision.get("spatial_merge_size", 2)
    side = _one(sizes["image_size"])
    if sizes["model_type"] == "internvl_vision":
        return "tiles", side, int(1 / vision.get("downsample_ratio", 0.5))
    tokens = vision.get("mm_tokens_per_image", 256)
    return "tiles", side, max(side // _one(sizes["patch_size"]) // isqrt(tokens), 1)


def _one(size: int | Sequence[int]) -> int:
    """Of a square."""
    return size if isinstance(size, int) else size[0]


@dataclass(frozen=True, kw_only=True)
class Images:
    """As many images of one size in each sequence.

    Args:
        tower: What they go through.
        count: Of each sequence.
        pixels: Along a side; rounded as image processors do.
        trained: Which parts of the model are.
    """

    tower: Tower
    count: int
    pixels: int
    trained: "frozenset[Part]"

    @property
    def side(self) -> int:
        """Tokens along the side of an image."""
        return max(round(self.pixels / (self.tower.patch * self.tower.merge)), 1)

    @property
    def tokens(self) -> int:
        """Of one image."""
        return self.side**2

    @property
    def patches(self) -> int:
        """Of the images of one sequence."""
        return self.count * self.tokens * self.tower.merge**2

    def flops(self, sequences: int) -> float:
        """Of the forward pass of so many: products, attention of whole images, and projectors."""
        tower, patches = self.tower, sequences * self.patches
        merged = tower.hidden * tower.merge**2
        factors = 3 if _BLOCKS.get(tower.kind, _Block()).inner == _GATED.inner else 2
        layer = 4 * tower.hidden**2 + factors * tower.hidden * tower.inner
        layer += 2 * tower.hidden * self.tokens * tower.merge**2  # scores, and what they weigh
        projected = tower.projectors * (merged + tower.features) * tower.hidden
        return 2.0 * patches * (tower.depth * layer + tower.values * tower.hidden + projected)

    def __str__(self) -> str:
        trained = "trained" if "vision" in self.trained else "frozen"
        return (
            f"{self.count} of {self.pixels} x {self.pixels} pixels in each sequence, {self.tokens} tokens each, "
            f"{trained} tower; --images N, --image_size PIXELS"
        )

    def lines(self, sizes: Sizes) -> list[Line]:
        """What the backward pass needs of a micro-batch's images."""
        tower, patches = self.tower, float(sizes.sequences * self.patches)
        merged = patches * tower.hidden * sizes.width
        found = []
        if "vision" in self.trained:
            kept = tower.depth * self._block(sizes)
            if tower.form == "sizes":  # which patches are of one image
                kept += patches**2 * sizes.width
            found = [Line("vision tower", kept, f"transformers: {tower.kind}")]
            found.append(Line("patches", patches * tower.values * sizes.width, f"transformers: {tower.kind}"))
        if self.trained & {"vision", "projector"}:
            found.append(Line("projector", 4 * tower.projectors * merged, f"transformers: {tower.kind}"))
        return found

    def _block(self, sizes: Sizes) -> float:
        tower, patches, width = self.tower, float(sizes.sequences * self.patches), sizes.width
        block = _BLOCKS.get(tower.kind, _Block())
        norms = (4 * width + block.single * SINGLE) * tower.hidden
        return patches * (block.attention * tower.hidden * width + norms + block.inner * tower.inner * width)

    def running(self, sizes: Sizes) -> float:
        """What the forward pass of the tower takes at its worst moment if it keeps nothing."""
        tower, patches = self.tower, float(sizes.sequences * self.patches)
        widest = max(4 * tower.inner, 6 * tower.hidden) * sizes.width
        return patches * (widest + 2 * tower.hidden * sizes.width)


def images_of(
    config: McaModelConfig,
    trained: "frozenset[Part]",
    seq_length: int,
    *,
    takes: bool,
    count: int | None = None,
    pixels: int | None = None,
) -> Images | None:
    """The images of each sequence that a plan counts.

    Args:
        config: The architecture.
        trained: Parts of the model.
        seq_length: Tokens of a sequence.
        takes: Whether the kind of run takes images.
        count: As asked for; None: one, if the model and the kind of run take any and it fits.
        pixels: As asked for; None: `PIXELS`.

    Raises:
        UsageError: What is asked for cannot be.
    """
    tower = Tower.of(config) if takes else None
    if tower is None:
        if count or pixels:
            raise UsageError(
                f"--images: a {config.model_type} model has no vision tower whose sizes are known, or this kind of "
                "run takes no images; leave it out"
            )
        return None
    if tower.side and pixels not in (None, tower.side):
        raise UsageError(
            f"--image_size {pixels}: images of {config.model_type}, or their tiles, are all of {tower.side} pixels; "
            "leave it out, and count tiles by --images"
        )
    asked = Images(
        tower=tower,
        count=1 if count is None else count,
        pixels=pixels or tower.side or PIXELS,
        trained=trained,
    )
    needed = asked.count * (asked.tokens + 1)
    if needed > seq_length:
        if count is None and pixels is None:
            return None
        raise UsageError(
            f"--images {asked.count}: they are {needed} tokens, and seq_length is {seq_length}; take fewer, smaller "
            "ones (--image_size), or a longer sequence"
        )
    return asked if asked.count else None
