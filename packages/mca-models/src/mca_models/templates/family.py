"""One model family: its config table and its parameters.

The families are the other files of this package.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import FamilyConfig, Values
from mca_models.templates.config_table import ConfigTable, TextFamilyTable
from mca_models.templates.parts.names import HF_HEAD, MoeNames
from mca_models.templates.parts.vision_tower import MORE, SPELLING, VisionModel
from mca_models.templates.shapes import Shape, hf_shapes
from mca_models.weights import Param

logger = logging.getLogger(__name__)


def count_mtp_layers(config: McaModelConfig, names: Collection[str], prefix: str | None = None) -> int:
    """Return the number of MTP layers of ``config.json``; 0 if the checkpoint holds none.

    ``transformers`` saves models without them.

    Args:
        config: The model.
        names: Of all tensors.
        prefix: What theirs begin with; None: HF numbers them after the decoder's.
    """
    mtp = prefix or f"model.layers.{config.num_layers}."
    if config.mtp_num_layers and not any(name.startswith(mtp) for name in names):
        logger.warning(
            "config.json counts %s, but the checkpoint has no such tensors; the model is built without",
            counted(config.mtp_num_layers, "MTP layer"),
        )
        return 0
    return config.mtp_num_layers


def _stacked_experts(names: Collection[str]) -> dict[str, bool]:
    """Detect whether one tensor holds the experts of a layer; MTP layers are checked separately."""
    stacked = [name for name in names if name.endswith(("experts.gate_up_proj", "experts.up_proj"))]
    extra = {"fused_experts": True} if any(not name.startswith("mtp.") for name in stacked) else {}
    if any(name.startswith("mtp.") for name in names):
        extra["fused_mtp_experts"] = any(name.startswith("mtp.") for name in stacked)
    return extra


def _none(config: FamilyConfig) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True, kw_only=True)
class Family:
    """Model family of one HF ``model_type``.

    Args:
        model_type: HF's name of the family.
        architecture: The HF causal-LM class.
        config: Carries ``config.json`` both ways.
        params: Every parameter of a model, in checkpoint order.
        ignored_hf: HF tensors that checkpoints hold and no model reads, in addition to RoPE frequencies.
        moe: Names inside an expert layer, if the family has any and files may hold them one by one.
        detect_extra: Entries of ``extra`` that only the names and shapes of tensors show.
        count_mtp: Number of MTP layers in a checkpoint with these tensor names.
        detect_fields: Fields of the configuration that only the names of tensors show.
        copies: HF tensors that may repeat another one, in addition to a tied head.
        unadaptable: Modules that PEFT refuses to adapt in models of this type, or adapts without effect.
        transposed_experts: The stacked weights of routed experts are stored transposed, which PEFT does not know.
        module_names: Facts in ``extra`` with which everything has the names of transformers' modules, where files
            have others.
        in_transformers: Whether transformers has the type; where not, models have their publisher's code, in which each
            routed expert is a separate module.
        fp8_unsupported: Why transformers cannot read weights of this type in fp8 blocks; None: it can.
        texts: The families that its text part may be of, by HF's ``model_type`` of that part.
        vision: Vision tower and projector; None for text models.
        built: The model that is built of a checkpoint, some of whose tensors only pass through.
    """

    model_type: str
    architecture: str
    config: ConfigTable | TextFamilyTable
    params: Callable[[FamilyConfig], list[Param]]
    ignored_hf: Callable[[FamilyConfig], frozenset[str]] = _none
    moe: MoeNames | None = None
    detect_extra: Callable[[McaModelConfig, Collection[str], Mapping[str, Shape]], Values] = (
        lambda config, names, shapes: {}
    )
    count_mtp: Callable[[McaModelConfig, Collection[str]], int] = count_mtp_layers
    detect_fields: Callable[[McaModelConfig, Collection[str]], Values] = lambda config, names: {}
    copies: Callable[[FamilyConfig], Mapping[str, str]] = lambda config: {}
    unadaptable: frozenset[str] = frozenset()
    transposed_experts: bool = False
    module_names: Values = field(default_factory=dict)
    in_transformers: bool = True
    fp8_unsupported: str | None = None
    texts: Mapping[str, "Family"] = field(default_factory=dict)
    vision: VisionModel | None = None
    built: Callable[[McaModelConfig], McaModelConfig] | None = None

    @property
    def table(self) -> ConfigTable:
        """Return the table of a text-only family, for the families that differ from it in a few values."""
        assert isinstance(self.config, ConfigTable), "text parts do not nest"
        return self.config

    def with_defaults(self, values: Values) -> "Family":
        """Return the text-only family for files that leave out keys, whose HF values are then ``values``."""
        return replace(self, config=replace(self.table, defaults={**self.table.defaults, **values}))

    def hf_shapes(self, config: McaModelConfig) -> dict[str, Shape]:
        """Every HF tensor of a model and its shape, known without a checkpoint."""
        return hf_shapes(self.params(config), config)

    def duplicated_hf_tensors(self, config: McaModelConfig) -> Mapping[str, str]:
        """HF tensors that may be present and must then equal another one: ``{name: the other}``.

        A tied model's file may hold the output layer again, an MTP layer the embedding.
        """
        if self.vision is not None:
            known = self.text(config).duplicated_hf_tensors(config)
            return {self.hf_name(config, name): self.hf_name(config, its) for name, its in known.items()}
        params = self.params(config) if config.head.tie_word_embeddings else ()
        alias = next((param for param in params if param.alias_of), None)
        head = {HF_HEAD: alias.hf_names()[0]} if alias else {}
        return {**head, **self.copies(config)}

    def hf_name(self, config: McaModelConfig, name: str) -> str:
        """Return the name in the checkpoint of ``config`` for the text model's ``name``."""
        return self.vision.spelling(config).text_to_file(name) if self.vision else name

    def with_module_names(self, config: McaModelConfig) -> McaModelConfig:
        """Return ``config`` with the names of transformers' modules instead of those of files."""
        extra = dict(self.text(config).module_names)
        if self.vision:
            extra[SPELLING] = len(self.vision.spellings) - 1
        return replace(config, extra={**config.extra, **extra})

    def with_checkpoint_names(
        self, config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape] | None = None
    ) -> McaModelConfig:
        """Return ``config`` with what only the tensor ``names`` of a HF checkpoint show.

        Whether experts lie stacked (``extra["fused_experts"]``), which tensors are there twice
        (``extra["hf_duplicates"]``), and whether the MTP layers that ``config.json`` counts are
        there at all: ``transformers`` saves models without them. With a vision model: how the files name things.

        Args:
            config: What ``config.json`` says.
            names: Of all tensors.
            shapes: Of those whose shape is known.
        """
        shapes = shapes or {}
        if self.vision is not None:
            return self._with_vision_names(self.vision, config, names, shapes)
        shown = {"mtp_num_layers": self.count_mtp(config, names), **self.detect_fields(config, names)}
        config = config.replace_fields(**shown)
        extra = {**config.extra, **self.detect_extra(config, names, shapes)}
        if self.moe:
            extra |= _stacked_experts(names)
        if doubled := sorted(name for name in self.duplicated_hf_tensors(config) if name in names):
            extra["hf_duplicates"] = doubled
        return replace(config, extra=extra)

    def _with_vision_names(
        self, vision: VisionModel, config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]
    ) -> McaModelConfig:
        """``with_checkpoint_names`` of the text part, under the names that it has alone, and of the vision model."""
        which = vision.detect_spelling(config, names)
        spelling = vision.spellings[which]
        alone = {spelling.text_from_file(name): name for name in names}
        sizes = {name: shapes[its] for name, its in alone.items() if its in shapes}
        config = self.text(config).with_checkpoint_names(config, alone.keys(), sizes)
        extra = {**config.extra, SPELLING: which}
        if "hf_duplicates" in extra:
            extra["hf_duplicates"] = [spelling.text_to_file(name) for name in extra["hf_duplicates"]]
        if more := vision.more(config, spelling, names, shapes):
            logger.warning(
                "copied unchanged and not trained, because mca does not know them: %s of the vision model (%s)",
                counted(len(more), "tensor"),
                next(iter(more)),
            )
            extra[MORE] = more
        return replace(config, extra={**extra, **self.detect_extra(config, names, shapes)})

    def require_family(self, config: McaModelConfig) -> None:
        """Raise if ``config`` cannot be a model of this family, or its vision model has impossible sizes."""
        kind = config.text_model_type
        if kind not in (self.texts or (None,)):
            known = ", ".join(self.texts) or "none"
            raise McaError(f"text_model_type is {kind!r:.80}; expected of a {self.model_type} model: {known}")
        mla = any(field.mca == "kv_lora_rank" for field in self.text(config).table.fields)
        if (config.mla is not None) != mla:
            raise McaError(f"kv_lora_rank is set or missing, unlike in a {self.model_type} model")
        if self.vision is not None:
            self.vision.tensors(config)
        elif config.vision is not None:
            raise McaError(f"vision is set, unlike in a {self.model_type} model, which has none; remove it")

    def text(self, config: McaModelConfig) -> "Family":
        """The family of the text part: itself without a vision model."""
        return self.texts[config.text_model_type] if config.text_model_type else self


def by_type(*families: Family) -> dict[str, Family]:
    """Return ``families``, which are those of a file, by their ``model_type``."""
    return {family.model_type: family for family in families}
