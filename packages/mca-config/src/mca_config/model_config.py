"""The architecture of a model as data, under Megatron's field names, with no Megatron import.

`mca_models.templates` converts a family's ``config.json`` to it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self, TypeVar, cast

from mca_config import _roll, fields, files
from mca_config.errors import McaError, list_problems, raise_problems, with_location
from mca_config.layout import ParallelLayout
from mca_config.model import SECTION_OF, SECTIONS, group_fields
from mca_config.model.attention import Attention, BlockSparseAttention, Dsa, Mla, SharedKv
from mca_config.model.block import Block, Mlp, Norm
from mca_config.model.embedding import Embedding, PerLayerEmbedding, Vision
from mca_config.model.head import Mtp, OutputHead
from mca_config.model.moe import Moe
from mca_config.model.recurrent_layers import (
    LightningAttention,
    LinearAttention,
    Mamba,
    SelectiveScan,
    ShortConvolution,
)
from mca_config.model.rope import MRope, Rope
from mca_config.model.section import (
    Layers,
    NotNegative,
    Positions,
    Section,
    Width,
    numeric_fields,
    range_problems,
    require_entries,
    require_matrix,
    require_numbers,
)
from mca_config.pipeline import PipelinePlan, pipeline_plan
from mca_config.printable import suggestion
from mca_config.types import JsonObject, Typed, Values

VERSION = 1
_PARTS = ("model", "layout", "hf_config")


def require_document(document: JsonObject, where: str) -> None:
    """Raise `McaError` for another version, for missing or unknown keys, and for parts that are not objects."""
    version = document.get("mca_version")
    if version != VERSION:
        raise McaError(
            f"{where}: mca_version must be {VERSION}, not {version!r:.80}; read it with a matching mca"
        )
    expected = {"mca_version", *_PARTS}
    for key in sorted((document.keys() - {"hf_model_type"}) ^ expected):  # repeats the model's type
        state = "missing" if key in expected else "unknown"
        raise McaError(f"{where}: {state} key {key}; expected {', '.join(sorted(expected))}")
    for key in _PARTS:
        require_object(document[key], f"{where}: {key}")


def require_object(value: Typed, name: str) -> None:
    """Raise `McaError` if ``value`` is not a JSON object; ``name`` is its name in the message."""
    if not isinstance(value, dict):
        raise McaError(f"{name} must be an object, not {value!r:.80}")


def require_same_family(document: JsonObject, where: str) -> None:
    """Raise `McaError` if ``hf_model_type`` or the embedded ``config.json`` has another model type than the model."""
    model, source = document.get("model"), document.get("hf_config")
    if not isinstance(model, dict) or not isinstance(source, dict):
        return
    outer: Typed = model.get("model_type")
    repeated: JsonObject = {
        "hf_model_type is": document.get("hf_model_type", outer),
        "hf_config has model_type": source.get("model_type", outer),
    }
    for words, inner in repeated.items():
        if inner != outer:
            raise McaError(f"{where}: {words} {inner!r:.80}, the model is {outer!r:.80}; restore the file")


T = TypeVar("T")
DtypeName = Literal["float32", "bfloat16", "float16"]
FILE_NAME = "mca_config.json"


@dataclass(frozen=True, kw_only=True)
class McaModelConfig:
    """One model: the shapes of its weights and the computation of its layers.

    Each feature has a section; an optional section is None where the model lacks the feature. Fields have Megatron's
    ``TransformerConfig`` names; fields without a Megatron name have HF's. Field names are unique over all sections, so
    that a flat dict of values describes a model too (:meth:`from_fields`). Values are resolved: no field means "look it
    up in the HF config".
    """

    model_type: str
    """HF ``model_type``; selects the template."""
    num_layers: Layers
    """Decoder layers, MTP layers not counted."""
    hidden_size: Width
    vocab_size: Width
    """True vocabulary rows, before padding to a multiple of tp."""
    max_position_embeddings: Positions
    dtype: DtypeName = "float32"
    """dtype of the weights on disk."""
    init_method_std: NotNegative = 0.02
    layer_types: tuple[str, ...] | None = None
    """HF's type of each decoder layer (``full_``, ``sliding_``, ``chunked_``, ``sparse_`` or ``linear_attention``),
    ``lightning``, ``mamba`` or ``conv``; with ``single_blocks`` also ``mlp`` and ``moe``; None: all layers are equal
    (sliding if ``window_size``)."""
    layer_type_overrides: JsonObject | None = None
    """Overrides of fields of any section, by layer type (see ``layer_types``); None: there are none."""
    text_model_type: str | None = None
    """HF ``model_type`` of the language model of a vision-language model."""

    attention: Attention
    mlp: Mlp
    rope: Rope = field(default_factory=Rope)
    norm: Norm = field(default_factory=Norm)
    block: Block = field(default_factory=Block)
    embedding: Embedding = field(default_factory=Embedding)
    head: OutputHead = field(default_factory=OutputHead)
    mtp: Mtp = field(default_factory=Mtp)
    moe: Moe | None = None
    mla: Mla | None = None
    dsa: Dsa | None = None
    block_sparse_attention: BlockSparseAttention | None = None
    linear_attention: LinearAttention | None = None
    lightning_attention: LightningAttention | None = None
    mamba: Mamba | None = None
    selective_scan: SelectiveScan | None = None
    short_convolution: ShortConvolution | None = None
    shared_kv: SharedKv | None = None
    per_layer_embedding: PerLayerEmbedding | None = None
    mrope: MRope | None = None
    vision: Vision | None = None

    extra: JsonObject = field(default_factory=dict)
    """Family-specific values without a Megatron name, under HF's names."""
    hf_config: JsonObject = field(default_factory=dict)
    """The source ``config.json`` verbatim; an export starts from it, so unknown fields are kept."""
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    """The parallel layout of the checkpoint."""

    def __post_init__(self) -> None:
        require_numbers(self)
        problems = [*self._problems()]
        for section in self._sections().values():
            problems += section.problems(self)
        if problems:
            raise McaError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        yield from require_entries("layer_types", self.layer_types, self.num_layers)
        yield from require_matrix(("hidden_size", self.hidden_size), ("vocab_size", self.vocab_size))

    @classmethod
    def from_fields(cls, **values: Typed) -> Self:
        """Return the configuration with these flat fields, e.g. ``kv_channels=64`` for ``attention.kv_channels``.

        An optional section is made if its key field (see `SECTIONS`) is given; fields of other sections are dropped.

        Raises:
            McaError: Values are out of range or contradict each other; the message names all of them.
        """
        own, groups = group_fields(values)
        known = cls.__dataclass_fields__
        if unknown := next((name for name in own if name not in known), None):
            near = suggestion(unknown, [*known, *SECTION_OF], "mca_config/model has all fields")
            raise McaError(f"a model has no field {unknown!r}{near}")
        made: JsonObject = {}
        problems: list[str] = []
        for name, group in groups.items():
            try:
                made[name] = None if group is None else SECTIONS[name].cls(**group)
            except McaError as error:
                problems.append(str(error))
        if problems:
            raise McaError("; ".join([*range_problems(own, numeric_fields(cls)), *problems]))
        return cls(**own, **made)

    def to_fields(self) -> JsonObject:
        """Return the flat fields of the model and its sections, and the key fields of the sections that it lacks."""
        flat = {name: value for name, value in fields.to_json(self).items() if name not in SECTIONS}
        flat |= {entry.key: entry.absent[0] for entry in SECTIONS.values() if entry.key is not None}
        for section in self._sections().values():
            flat |= fields.to_json(section)
        return flat

    def replace_fields(self, **changes: Typed) -> Self:
        """Return this configuration with changed flat fields, as for :meth:`from_fields`."""
        return self.from_fields(**(self.to_fields() | changes))

    def _sections(self) -> dict[str, Section]:
        sections = {name: getattr(self, name) for name in SECTIONS}
        return {name: section for name, section in sections.items() if section is not None}

    @property
    def has_custom_norms(self) -> bool:
        """Return whether layer norms are mca's modules, which Transformer Engine cannot fuse into a linear layer."""
        norm = self.norm
        biased = norm.normalization == "RMSNorm" or norm.norm_bias
        block = self.block
        shared = block.parallel_block != "none" or block.normed_residual or self.has_parallel_mamba
        return shared or not norm.norm_weight or not biased

    @property
    def has_parallel_mamba(self) -> bool:
        """Return whether layers with attention have a parallel Mamba mixer."""
        return self.mamba is not None and self.mamba.mamba_parallel_attention

    @property
    def attention_biases(self) -> bool:
        """Return whether all linear layers of attention have biases."""
        own = self.attention.add_bias_attention
        return self.mlp.add_bias_linear if own is None else own

    @property
    def rotated_channels(self) -> int:
        """Channels of a query or key head that RoPE rotates."""
        if self.mla is not None:
            return self.mla.qk_pos_emb_head_dim
        return int(self.attention.kv_channels * self.rope.rotary_percent)

    @property
    def has_custom_qkv(self) -> bool:
        """Return whether q, k and v differ from Megatron's, or between layers."""
        own = self.attention
        custom = own.values_are_keys or own.value_norm or own.value_scale != 1.0
        custom = custom or own.head_gate or self.shared_kv is not None
        by_layer = any(
            set(changes) - {"norm_placement"} for changes in (self.layer_type_overrides or {}).values()
        )
        return custom or by_layer or own.value_width != own.kv_channels

    @property
    def num_experts(self) -> int:
        """Routed experts with weights of an MoE layer; 0: the model has none."""
        return 0 if self.moe is None else self.moe.num_moe_experts

    @property
    def vision_fields(self) -> JsonObject | None:
        """Fields of ``config.json`` about the vision tower; None: the model has none."""
        return None if self.vision is None else self.vision.vision_fields

    @property
    def mtp_num_layers(self) -> int:
        """MTP layers; 0: the model has none."""
        return self.mtp.mtp_num_layers

    @property
    def per_layer_input_size(self) -> int:
        """Channels of each layer's per-layer embedding; 0: the model has none."""
        return 0 if self.per_layer_embedding is None else self.per_layer_embedding.per_layer_input_size

    @property
    def accepts_keys(self) -> bool:
        """Return whether this is the configuration of a layer with shared KV, which projects only queries."""
        return self.shared_kv is not None and self.shared_kv.accepts_keys

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows of all tensor-parallel ranks: ``vocab_size`` rounded up to a multiple of tp."""
        return -(-self.vocab_size // self.layout.tp) * self.layout.tp

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has experts."""
        return self.moe is not None and (
            self.moe.moe_layer_freq is None or bool(self.moe.moe_layer_freq[layer])
        )

    def layer_config(self, layer: int) -> Self:
        """Return this configuration with the fields of decoder ``layer``."""
        kind = self._kind(layer), self.kv_source_layer(layer) is not None
        if kind not in self._by_kind:
            self._by_kind[kind] = self._make_layer_config(*kind)
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> dict[tuple[str | None, bool], Self]:
        """Cache of :meth:`layer_config`, which runs for every parameter and whose results check all fields."""
        return {}

    def _make_layer_config(self, kind: str | None, accepts_keys: bool) -> Self:
        changes = {**((self.layer_type_overrides or {}).get(kind or "") or {})}
        if accepts_keys and self.shared_kv is not None:
            width = self.mlp.ffn_hidden_size * (2 if self.shared_kv.double_wide_mlp else 1)
            changes |= {"accepts_keys": True, "double_wide_mlp": False, "ffn_hidden_size": width}
        return self.replace_fields(layer_type_overrides=None, **changes) if changes else self

    def kinds(self) -> list[Self]:
        """Return one configuration for each distinct kind of layer."""
        if not (self.layer_type_overrides and self.layer_types) and self.shared_kv is None:
            return [self]
        first: dict[tuple[str | None, bool], int] = {}
        for layer in range(self.num_layers):
            first.setdefault((self._kind(layer), self.kv_source_layer(layer) is not None), layer)
        return [self.layer_config(layer) for layer in first.values()]

    def kv_source_layer(self, layer: int) -> int | None:
        """Return the decoder layer whose keys and values ``layer`` shares; None: it projects its own."""
        first_shared = self.num_layers - (
            0 if self.shared_kv is None else self.shared_kv.num_kv_shared_layers
        )
        if layer < first_shared:
            return None
        return max(other for other in range(first_shared) if self._kind(other) == self._kind(layer))

    def is_linear_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has linear attention (a gated delta net)."""
        return self._kind(layer) == "linear_attention"

    def is_mamba_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` is a Mamba layer."""
        return self._kind(layer) == "mamba"

    def is_scan_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` is a Mamba 1 layer."""
        return self._kind(layer) == "selective_scan"

    def is_conv_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` is a gated short convolution."""
        return self._kind(layer) == "conv"

    def is_lightning_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has lightning attention."""
        return self._kind(layer) == "lightning"

    def has_mixer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has one of mca's modules in place of attention."""
        return self._kind(layer) in ("linear_attention", "lightning", "mamba", "selective_scan", "conv")

    def has_attention(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has attention, or a replacement for it (linear attention, Mamba, conv)."""
        return not self.block.single_blocks or self._kind(layer) not in ("mlp", "moe")

    def has_mlp(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has an MLP, dense or MoE."""
        return not self.block.single_blocks or not self.has_attention(layer)

    def _kind(self, layer: int) -> str | None:
        return self.layer_types[layer] if self.layer_types else None

    def pipeline_plan(self) -> PipelinePlan:
        """Return the assignment of layers to the pipeline ranks and virtual stages of :attr:`layout`."""
        return pipeline_plan(self.layout, self.num_layers, self.mtp_num_layers)

    @property
    def hf_model_type(self) -> str:
        """``model_type`` by the name under which LLaMA-Factory reads it, here and in ``mca_config.json``."""
        return self.model_type

    def to_dict(self) -> JsonObject:
        """Return the contents of ``mca_config.json``."""
        model = fields.to_json(self)
        model |= {name: fields.to_json(section) for name, section in self._sections().items()}
        layout, hf_config = fields.to_json(model.pop("layout")), model.pop("hf_config")
        return {
            "mca_version": VERSION,
            "hf_model_type": self.hf_model_type,
            "model": model,
            "layout": layout,
            "hf_config": hf_config,
        }

    def to_json(self) -> str:
        """Return the text of ``mca_config.json``."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_dict(document: JsonObject, where: str = FILE_NAME) -> "McaModelConfig":
        """Read the output of :meth:`to_dict`, or of ROLL's mcore_adapter; ``where`` names it in errors."""
        if "mca_version" not in document and _roll.is_roll(document):
            require_ranges(document)  # before lists of the stated lengths are allocated
            document = _roll.document_from_roll(document, where)
            own, groups = group_fields(document["model"])
            document["model"] = own | groups
        else:
            require_same_family(document, where)
        require_document(document, where)
        model = {**document["model"], "hf_config": document["hf_config"]}
        model["layout"] = fields.from_json(ParallelLayout, document["layout"], f"{where}: layout")
        try:
            config = _read_model(model, f"{where}: model")
            for kind, changes in (config.layer_type_overrides or {}).items():
                place = f"{where}: layer_type_overrides {kind}"
                require_object(changes, f"layer_type_overrides {kind}")
                own, groups = group_fields(config.to_fields() | {"layer_type_overrides": None} | changes)
                _read_model(own | groups, place)
        except McaError as error:
            raise with_location(error, where) from None
        return config

    @staticmethod
    def from_json(text: str, where: str = FILE_NAME) -> "McaModelConfig":
        """Parse JSON ``text`` and pass it to :meth:`from_dict`."""
        return McaModelConfig.from_dict(files.parse_object(text, where), where)

    def save(self, directory: str | Path) -> Path:
        """Write ``mca_config.json`` into ``directory`` and return its path."""
        (path := Path(directory) / FILE_NAME).write_text(self.to_json(), encoding="utf-8")
        return path

    @staticmethod
    def load(directory: str | Path) -> "McaModelConfig":
        """Read ``directory``'s ``mca_config.json``."""
        path = files.resolve_inside(Path(directory), FILE_NAME)
        text = files.read_text(path, "expected an MCA checkpoint directory")
        return McaModelConfig.from_json(text, str(path))


def _read_model(model: JsonObject, where: str) -> McaModelConfig:
    """Return the configuration of ``model``, whose sections are JSON objects."""
    made: JsonObject = {}
    problems: list[str] = []
    for name, entry in SECTIONS.items():
        value: Typed = model.get(name)
        if value is None and (entry.key is not None or name not in model):
            continue
        try:
            require_object(value, name)
            made[name] = _read(entry.cls, value, f"{where}.{name}")
        except McaError as error:
            problems += list_problems(error) if len(list_problems(error)) > 1 else [str(error)]
    raise_problems(problems, where)
    return _read(McaModelConfig, model | made, where)


def _read(cls: type[T], values: JsonObject, where: str) -> T:
    """Return an instance of ``cls`` from JSON values; an unknown key is named with a similar one."""

    def unknown(key: str, known: Iterable[str]) -> str:
        if key in SECTION_OF:
            return f"{key} is a field of section {SECTION_OF[key]}; move it there"
        advice = "remove it, or read the file with the version of mca that wrote it"
        return f"unknown key {key}{suggestion(key, known, advice)}"

    (made,) = fields.build([cls], values, where=where, unknown=unknown, words=False)
    return cast(T, made)


def require_ranges(values: Values, keys: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check that flat fields are in range, before anything of the size that they state is allocated.

    Args:
        values: The values by field.
        keys: Other names for fields in the errors: those of the file that they come from.

    Raises:
        McaError: Fields are out of range; the message names all of them.
    """
    own, groups = group_fields(values)
    problems = [*range_problems(own, numeric_fields(McaModelConfig), keys)]
    for name, group in groups.items():
        problems += range_problems(group or {}, numeric_fields(SECTIONS[name].cls), keys)
    if problems:
        raise McaError("; ".join(problems))


def training_dtype(config: McaModelConfig, args: object) -> DtypeName:
    """Return the training dtype: that of the training arguments, else that of the checkpoint."""
    flags = vars(args)  # only training arguments have bf16 and fp16
    return "bfloat16" if flags.get("bf16") else "float16" if flags.get("fp16") else config.dtype
