"""The architecture of a model as data, under Megatron's field names, with no Megatron import.

`mca_models.templates` converts a family's ``config.json`` to it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mca_config import _roll, fields, files
from mca_config._documents import VERSION, require_document, require_object, require_same_family
from mca_config._layers import Layers
from mca_config.bounds import require_bounded, require_consistent, require_numbers
from mca_config.errors import McaError, with_location
from mca_config.layout import ParallelLayout
from mca_config.pipeline import PipelinePlan, pipeline_plan
from mca_config.rope import require_rope
from mca_config.types import JsonObject

HeadKind = Literal["causal_lm", "sequence_classification", "token_classification"]
"""Kind of Hugging Face class: ``...ForCausalLM``, ``...ForSequenceClassification``, ..."""
DtypeName = Literal["float32", "bfloat16", "float16"]
FILE_NAME = "mca_config.json"


@dataclass(frozen=True, kw_only=True)
class McaModelConfig(Layers):
    """One model: the shapes of its weights and the computation of its layers.

    Fields have Megatron's ``TransformerConfig`` names; fields without a Megatron name have HF's.
    Values are resolved: no field means "look it up in the HF config".
    """

    model_type: str
    """HF ``model_type``; selects the template."""
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads."""
    kv_channels: int
    """Head dimension."""
    vocab_size: int
    """True vocabulary rows, before padding to a multiple of tp."""
    max_position_embeddings: int
    dtype: DtypeName = "float32"
    """dtype of the weights on disk."""

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: float = 1e-6
    layernorm_zero_centered_gamma: bool = False
    norm_weight: bool = True
    """Layer norms and the final norm have weights."""
    norm_bias: bool = True
    """LayerNorms have biases too."""
    embedding_norm: bool = False
    """A norm without weights follows the word embedding."""
    parallel_block: Literal["none", "one_norm", "two_norms"] = "none"
    """Attention and MLP run in parallel on the same input, after one shared norm or two separate norms."""
    gated_linear_unit: bool = True
    hidden_act: str = "silu"
    """HF activation name."""
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    add_bias_attention: bool | None = None
    """Biases on the linear layers of attention, including the output projection; None: as ``add_bias_linear``."""
    output_bias: bool = False
    """The output layer adds a bias to the logits."""
    qk_layernorm: bool = False
    qk_layernorm_full_width: bool = False
    """The norms of q and k span all heads together and have a weight for each channel of each head."""
    qk_layernorm_after_rope: bool = False
    """q and k are normalised after RoPE, not before; layers without RoPE have no such norm."""
    qk_layernorm_per_head: bool = False
    """The norms of q and k have separate weights for each head, without biases."""
    qk_layernorm_weight: bool = True
    value_channels: int | None = None
    """Value channels of a head; None: ``kv_channels``."""
    values_are_keys: bool = False
    """The values are the keys before their norm: there is no value projection."""
    value_norm: bool = False
    """Values pass a norm without weights."""
    value_scale: float = 1.0
    """Factor on values."""
    layer_scalar: bool = False
    """The output of each layer is multiplied by a per-layer scalar that is not trained."""
    per_layer_input_size: int = 0
    """Channels of the per-layer embedding, which each layer takes in addition to the hidden states; 0: none."""
    clip_qkv: float | None = None
    """Queries, keys and values are clipped to plus or minus this value before RoPE; None: no clipping."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before attention and MLP, after them (before the residual is added), or both."""
    attention_output_gate: bool = False
    """A sigmoid gate, projected together with q, multiplies each head's output."""
    softmax_scale: float | None = None
    """Factor on attention scores; None: ``kv_channels ** -0.5``."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """``learnable``: each head has an attention sink, a learned logit in addition to those of its keys."""
    attn_logit_softcapping: float | None = None
    """Soft cap c of attention scores: ``c * tanh(x / c)``; None: no cap."""
    attn_temperature: JsonObject | None = None
    """``beta``, ``length``, ``first`` of the query temperature: queries at position p are multiplied by
    ``1 + beta ln(1 + floor((p + first) / length))``, only in layers without RoPE if there are any; None: no factor."""
    attention_chunk_size: int | None = None
    """Chunk length of ``chunked_attention`` layers, in which a query attends only within its chunk."""
    final_logit_softcapping: float | None = None
    """Soft cap of the output layer's logits; None: no cap."""
    glu_linear_offset: float = 0.0
    """Offset of the up half of a gated MLP: ``activation(gate) * (up + offset)``."""
    activation_func_clamp_value: float | None = None
    """Upper limit of the gate, and limit of the up half on both sides; None: no clamp."""
    mlp_multipliers: tuple[float, ...] | None = None
    """Factors on the gate of an MLP and on its output; None: no factors."""
    embedding_multiplier: float = 1.0
    """Factor on the word embeddings, rounded to their dtype."""
    residual_multiplier: float = 1.0
    """Factor on the outputs of attention and MLP before the residual addition."""
    logits_scaling: float = 1.0
    """Divisor of the output layer's logits."""
    tie_word_embeddings: bool = False
    """The output layer shares the embedding's weight."""
    head: HeadKind = "causal_lm"
    """Kind of head: language-model logits, or sequence- or token-classification logits."""
    num_labels: int | None = None
    """Outputs of a classification head; None: the head is a language-model head."""
    pad_token_id: int | None = None
    """Token whose input embedding gets no gradient; None: all tokens get one."""
    init_method_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    """Dropout of the outputs of attention and MLP before the residual addition."""
    embedding_dropout: float = 0.0
    """Dropout of embeddings, used only if ``hidden_dropout`` is above 0 too."""
    learned_positions: bool = False
    """Learned position embeddings are added to the word embeddings; there is no RoPE."""
    alibi: bool = False
    """ALiBi instead of RoPE: a per-head slope times the key position is added to the attention scores."""
    embedding_layernorm: bool = False
    """A norm with weights follows the embeddings."""
    position_offset: int = 0
    """Rows of the position embedding before the row of the first position."""

    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_backwards: bool = False
    """RoPE rotates pairs of channels by negative angles."""
    rope_scaling: JsonObject | None = None
    """HF's RoPE parameters without ``rope_theta`` (``rope_type``, ``factor``, ...); None: unscaled."""
    rotary_base_local: float | None = None
    """Base of the unscaled RoPE of ``sliding_attention`` layers; None: all layers use the same RoPE."""
    no_rope_freq: tuple[int, ...] | None = None
    """1 for each decoder layer without RoPE, 0 for one with; None: all layers have RoPE."""
    window_size: int | None = None
    """Tokens in the window of a sliding-window layer, including the query; None: full causal attention."""
    index_blocks: JsonObject | None = None
    """Block selection of ``sparse_attention`` layers: an index query of ``channels`` for each key/value head selects
    ``topk`` blocks of ``size`` keys, always with the last ``local`` blocks; None: there are no such layers."""

    linear_conv_kernel_dim: int | None = None
    """Kernel size of the causal convolution in ``linear_attention`` layers (gated delta net); None: no such layers."""
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_channel_decay: bool = False
    """Per-channel decay of keys and low-rank gates (Kimi Delta Attention)."""
    linear_beta_factor: float = 1.0
    """Factor on beta, the sigmoid write strength of the delta rule."""
    linear_norm_epsilon: float | None = None
    """Epsilon of the output norm of linear attention; None: ``layernorm_epsilon``."""

    mamba_num_heads: int | None = None
    """Heads of ``mamba`` layers (Mamba-2); None: there are no such layers."""
    mamba_head_dim: int | None = None
    mamba_num_groups: int | None = None
    """Groups of heads with the same B and C."""
    mamba_state_dim: int | None = None
    """State channels for each channel of a head."""
    mamba_conv_kernel_dim: int | None = None
    mamba_conv_bias: bool = True
    mamba_least_step: float = 0.0
    """Lower limit of the time step dt."""
    mamba_norm: Literal["gated", "before_gate", "none"] = "gated"
    """Norm of the Mamba output: together with its gate, before the gate, or none."""
    mamba_multipliers: tuple[float, ...] | None = None
    """Factors on the parts of the input projection (z, x, B, C, dt) and on the output; None: no factors."""
    mamba_beside_attention: bool = False
    """Every layer with attention has a parallel Mamba mixer on the same input, and both outputs are added."""
    attention_out_multiplier: float = 1.0
    """Factor on the attention output of layers with a parallel Mamba mixer."""

    num_moe_experts: int | None = None
    moe_layer_freq: tuple[int, ...] | None = None
    """1 for each decoder layer with experts, 0 for a dense one; None: all layers have ``num_moe_experts`` experts."""
    moe_ffn_hidden_size: int | None = None
    moe_latent_size: int | None = None
    """Input and output size of routed experts, with projections from and to ``hidden_size``; None: no projections."""
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_score: Literal["top_sum", "max"] = "top_sum"
    """Score of an expert group: the sum of its two highest expert scores, or its highest one."""
    moe_router_topk_scaling_factor: float | None = None
    moe_router_normalised: bool = True
    """The sigmoid scores of a token's experts are divided by their sum."""
    sparse_mixer_jitter: float | None = None
    """Threshold of SparseMixer, which in training samples two experts near the highest logit; None: top-k router."""
    input_jitter_noise: float = 0.0
    """Noise on the inputs of a SparseMixer router and of its experts in training."""
    moe_apply_probs_on_input: bool = False
    """The router weight multiplies the input of an expert instead of its output."""
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_shared_expert_mean: bool = False
    """The outputs of the shared expert and the routed experts are averaged instead of added."""
    experts_beside_mlp: bool = False
    """The shared expert is the layer's MLP: it and the routed experts have separate norms, and the router has learned
    factors."""
    moe_shortcut: bool = False
    """Shortcut MoE: layers form pairs, and the routed output of the first layer is added after the second layer, while
    the output of its MLP, the shared expert, is added at once."""
    moe_identity_experts: int = 0
    """Identity (zero-compute) experts without weights; they come after the other experts in the router."""
    moe_aux_loss_coeff: float = 0.0
    """HF's ``router_aux_loss_coef``, for one loss over all layers; the arguments have Megatron's, for each layer."""
    moe_router_load_balancing_type: str = "none"
    mtp_num_layers: int = 0
    mtp_before_final_norm: bool = False
    """MTP layers take the output of the last decoder layer without the final norm."""

    text_model_type: str | None = None
    """HF ``model_type`` of the language model of a vision-language model."""
    vision: JsonObject | None = None
    """Fields of ``config.json`` about the vision tower, its parameter prefix and its tokens; None: no vision tower."""
    mrope_section: tuple[int, ...] | None = None
    """M-RoPE: numbers of rotated channel pairs for the time, row and column of a token; None: one position."""
    mrope_interleaved: bool = False
    """Channel pairs of time, row and column alternate instead of forming three blocks."""
    deepstack_layers: int = 0
    """Number of first decoder layers after which features of inner vision layers are added to image tokens."""

    extra: JsonObject = field(default_factory=dict)
    """Family-specific values without a Megatron name, under HF's names."""
    hf_config: JsonObject = field(default_factory=dict)
    """The source ``config.json`` verbatim; an export starts from it, so unknown fields are kept."""
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    """The parallel layout of the checkpoint."""

    def __post_init__(self) -> None:
        require_numbers(self)
        require_bounded(vars(self))
        require_consistent(vars(self))

    @property
    def has_custom_norms(self) -> bool:
        """Return whether layer norms are mca's modules, which Transformer Engine cannot fuse into a linear layer."""
        biased = self.normalization == "RMSNorm" or self.norm_bias
        shared = self.parallel_block != "none" or self.mamba_beside_attention
        return shared or not self.norm_weight or not biased

    @property
    def attention_biases(self) -> bool:
        """Return whether all linear layers of attention have biases."""
        return self.add_bias_linear if self.add_bias_attention is None else self.add_bias_attention

    @property
    def value_width(self) -> int:
        """Value channels of a head."""
        return self.kv_channels if self.value_channels is None else self.value_channels

    @property
    def has_custom_qkv(self) -> bool:
        """Return whether q, k and v differ from Megatron's, or between layers."""
        custom = self.values_are_keys or self.value_norm or self.value_scale != 1.0
        custom = custom or self.takes_keys or self.num_kv_shared_layers > 0
        by_layer = any(set(changes) - {"norm_placement"} for changes in (self.of_kind or {}).values())
        return custom or by_layer or self.value_width != self.kv_channels

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has experts."""
        flags = self.moe_layer_freq
        return self.num_moe_experts is not None and (flags is None or bool(flags[layer]))

    @property
    def num_router_choices(self) -> int:
        """Outputs of the router: experts with weights and identity experts."""
        return (self.num_moe_experts or 0) + self.moe_identity_experts

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows of all tensor-parallel ranks: ``vocab_size`` rounded up to a multiple of tp."""
        return -(-self.vocab_size // self.layout.tp) * self.layout.tp

    def pipeline_plan(self) -> PipelinePlan:
        """Return the assignment of layers to the pipeline ranks and virtual stages of :attr:`layout`."""
        return pipeline_plan(self.layout, self.num_layers, self.mtp_num_layers)

    def distribute_config_match(self, other: "McaModelConfig") -> bool:
        """Return whether every rank has the same shards under both layouts, so that it can load its own file.

        Only tp, the layers of each pipeline rank and, with experts, ep and etp matter.
        """
        first, second = self.layout, other.layout
        experts = self.num_moe_experts is not None and (first.ep, first.etp) != (second.ep, second.etp)
        return first.tp == second.tp and not experts and self._layers_by_rank() == other._layers_by_rank()

    def _layers_by_rank(self) -> list[tuple[set[int], set[int]]]:
        plan = self.pipeline_plan()
        return [
            (set(plan.rank_layers(pp)), {index for chunk in chunks for index in chunk.mtp_layers})
            for pp, chunks in enumerate(plan.chunks)
        ]

    def to_dict(self) -> JsonObject:
        """Return the contents of ``mca_config.json``."""
        model = fields.to_json(self)
        layout, hf_config = fields.to_json(model.pop("layout")), model.pop("hf_config")
        return {"mca_version": VERSION, "model": model, "layout": layout, "hf_config": hf_config}

    def to_json(self) -> str:
        """Return the text of ``mca_config.json``."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_dict(document: JsonObject, where: str = FILE_NAME) -> "McaModelConfig":
        """Read the output of :meth:`to_dict` of any class, or of ROLL's mcore_adapter; ``where`` names it in errors."""
        if "mca_version" not in document and _roll.is_roll(document):
            document = _roll.document_from_roll(document, where)
        else:
            require_same_family(document, where)
        require_document(document, where)
        model = {**document["model"], "hf_config": document["hf_config"]}
        model["layout"] = fields.from_json(ParallelLayout, document["layout"], f"{where}: layout")
        cls = MlaMcaModelConfig if "kv_lora_rank" in model else McaModelConfig
        try:
            config = fields.from_json(cls, model, f"{where}: model")
            for kind, changes in (config.of_kind or {}).items():
                require_object(changes, f"of_kind {kind}")
                fields.from_json(cls, {**model, "of_kind": None, **changes}, f"{where}: of_kind {kind}")
            require_rope(config.rope_scaling)
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


@dataclass(frozen=True, kw_only=True)
class MlaMcaModelConfig(McaModelConfig):
    """A model with multi-head latent attention."""

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_head_dim: int
    """No-rope channels of a query or key head."""
    qk_pos_emb_head_dim: int
    v_head_dim: int
    rotary_halves: bool = False
    """Checkpoints store RoPE channels as two halves, while Megatron interleaves the channels of a pair."""
    query_multiplier: float = 1.0
    """Factor on queries."""
    latent_multiplier: float = 1.0
    """Factor on the compressed keys and values after their norm, but not on the RoPE channels of keys."""
    index_topk: int | None = None
    """Keys that the indexer selects for each query; None: full causal attention."""
    index_num_heads: int | None = None
    index_head_dim: int | None = None
    index_rotary_interleaved: bool = False
    """The RoPE of the indexer interleaves the channels of a pair."""


def training_dtype(config: McaModelConfig, args: object) -> DtypeName:
    """Return the training dtype: that of the training arguments, else that of the checkpoint."""
    flags = vars(args)  # only training arguments have bf16 and fp16
    return "bfloat16" if flags.get("bf16") else "float16" if flags.get("fp16") else config.dtype
