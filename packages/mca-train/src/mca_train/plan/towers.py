"""Images that a plan assumes in each sequence, and what a vision tower keeps of them.

Towers are transformers' own classes and whole on every rank of the first stage. The lines were read off the dry run.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_train.plan.sizes import SINGLE, Line, Sizes

if TYPE_CHECKING:
    from mca_train.config.parts import Part

PIXELS = 448
"""The side of an image unless a plan is told otherwise."""
_GATED, _IN_FULL = ("qwen2_5_vl_vision", "glm4v_vision", "glm4v_moe_vision"), ("qwen2_vl_vision",)
"""Towers with a gated MLP and norms in fp32; those with an approximate GELU that keeps its factors."""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The sizes of a vision tower that takes a grid of patches."""

    kind: str
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

    @classmethod
    def of(cls, config: McaModelConfig) -> "Tower | None":
        """That of a model; None: it has none, or one that takes images otherwise."""
        found = (config.vision or {}).get("vision_config")
        if found is None or config.vision is None or "image_token_id" not in config.vision:
            return None
        import transformers

        known = transformers.AutoConfig.for_model(config.model_type, vision_config=dict(found))
        sizes = known.vision_config.to_dict()
        if not {"depth", "spatial_merge_size", "temporal_patch_size"} <= sizes.keys():
            return None
        hidden = sizes.get("embed_dim") or sizes["hidden_size"]
        patch = sizes["patch_size"]
        return cls(
            kind=sizes["model_type"],
            depth=sizes["depth"],
            hidden=hidden,
            inner=sizes.get("intermediate_size") or hidden * sizes["mlp_ratio"],
            features=sizes.get("out_hidden_size") or sizes["hidden_size"],
            merge=sizes["spatial_merge_size"],
            patch=patch,
            values=sizes.get("in_channels", 3) * sizes["temporal_patch_size"] * patch**2,
            projectors=1 + config.deepstack_layers,
        )


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
            found = [Line("vision tower", tower.depth * self._block(sizes), f"transformers: {tower.kind}")]
            found.append(Line("patches", patches * tower.values * sizes.width, f"transformers: {tower.kind}"))
        if self.trained & {"vision", "projector"}:
            found.append(Line("projector", 4 * tower.projectors * merged, f"transformers: {tower.kind}"))
        return found

    def _block(self, sizes: Sizes) -> float:
        tower, patches, width = self.tower, float(sizes.sequences * self.patches), sizes.width
        attention = 7 * tower.hidden * width  # q, k, v as projected, q and k rotated, output, and joined
        norms = 2 * 2 * tower.hidden * width  # input and output
        inner = 2 * tower.inner * width
        if tower.kind in _GATED:
            norms = 2 * tower.hidden * (SINGLE + 2 * width)
            inner = 4 * tower.inner * width
        elif tower.kind in _IN_FULL:
            inner = 3 * tower.inner * width
        return patches * (attention + norms + inner)

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
                f"--images: a {config.model_type} model has no vision tower that takes a grid of patches, or this "
                "kind of run takes no images; leave it out"
            )
        return None
    asked = Images(tower=tower, count=1 if count is None else count, pixels=pixels or PIXELS, trained=trained)
    needed = asked.count * (asked.tokens + 1)
    if needed > seq_length:
        if count is None and pixels is None:
            return None
        raise UsageError(
            f"--images {asked.count}: they are {needed} tokens, and seq_length is {seq_length}; take fewer, smaller "
            "ones (--image_size), or a longer sequence"
        )
    return asked if asked.count else None
