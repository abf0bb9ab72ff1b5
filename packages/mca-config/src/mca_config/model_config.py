"""The architecture of a model as data, under Megatron's field names, with no Megatron import.

How a family's ``config.json`` becomes one is written in `mca_models.templates`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mca_config import _roll, fields, files
from mca_config._documents import VERSION, require_document, require_object, require_same_family
from mca_config._layers import Layers
from mca_config.bounds import require_bounded, require_fitting, require_numbers
from mca_config.errors import McaError, named
from mca_config.layout import ParallelLayout
from mca_config.pipeline import PipelinePlan, pipeline_plan
from mca_config.rope import require_rope
from mca_config.types import JsonObject

HeadKind = Literal["causal_lm", "sequence_classification", "token_classification"]
"""Which of Hugging Face's classes a model is: ``...ForCausalLM``, ``...ForSequenceClassification``, ..."""
DtypeName = Literal["float32", "bfloat16", "float16"]
FILE_NAME = "mca_config.json"


@dataclass(frozen=True, kw_only=True)
class McaModelConfig(Layers):
    """One model: what its weights look like and how its layers compute.

    Fields carry Megatron's ``TransformerConfig`` names; those that Megatron takes elsewhere carry HF's.
    Values are resolved: no field means "look it up in the HF config".
    """

    model_type: str
    """HF ``model_type``; names the template."""
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
    """Norms around attention and MLP, and the last one, have weights."""
    norm_bias: bool = True
    """They have biases too if they are LayerNorms."""
    embedding_norm: bool = False
    """The embeddings are normalised before the first layer, without weights."""
    parallel_block: Literal["none", "one_norm", "two_norms"] = "none"
    """Attention and MLP take the same input and are added together, after one norm, or each after its own."""
    gated_linear_unit: bool = True
    hidden_act: str = "silu"
    """HF activation name."""
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    add_bias_attention: bool | None = None
    """Biases on the linears of attention, its output included; None: as ``add_bias_linear`` says."""
    output_bias: bool = False
    """The output layer adds a bias to the logits."""
    qk_layernorm: bool = False
    qk_layernorm_full_width: bool = False
    """The norms of q and k span all heads together and have a weight for each channel of each head."""
    qk_layernorm_after_rope: bool = False
    """q and k are normalised after they are rotated, not before; in layers without a rope they are not."""
    qk_layernorm_per_head: bool = False
    """The norms of q and k have weights for each head of its own, without biases."""
    qk_layernorm_weight: bool = True
    value_channels: int | None = None
    """Channels of a head's values; None: ``kv_channels``."""
    values_are_keys: bool = False
    """The values are what the keys are before their norm: there is no projection of their own."""
    value_norm: bool = False
    """Values are normalised, without weights."""
    value_scale: float = 1.0
    """Factor on values."""
    layer_scalar: bool = False
    """What a layer gives is multiplied by a number of its own, which is not trained."""
    per_layer_input_size: int = 0
    """Channels of an embedding of its own that each layer takes beside the hidden states; 0: there is none."""
    clip_qkv: float | None = None
    """Queries, keys and values are clipped to its size before they are rotated; None: they stay."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before attention and MLP, after them (before the residual is added), or both."""
    attention_output_gate: bool = False
    """A sigmoid gate, projected beside q, on each head's output."""
    softmax_scale: float | None = None
    """Factor on attention scores; None: ``kv_channels ** -0.5``."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """``learnable``: each head has a logit of its own beside its keys' (an attention sink)."""
    attn_logit_softcapping: float | None = None
    """Attention scores x become ``c * tanh(x / c)``; None: they stay."""
    attn_temperature: JsonObject | None = None
    """``beta``, ``length``, ``first``: queries at position p are multiplied by
    ``1 + beta ln(1 + floor((p + first) / length))``, where some layers have no rope in those only; None: they stay."""
    attention_chunk_size: int | None = None
    """Positions that see each other in ``chunked_attention`` layers, which are cut into such chunks."""
    final_logit_softcapping: float | None = None
    """The same for the output layer's logits."""
    glu_linear_offset: float = 0.0
    """Added to the up half of a gated MLP: ``activation(gate) * (up + offset)``."""
    activation_func_clamp_value: float | None = None
    """The gate is clamped from above by it, the up half from both sides; None: neither."""
    mlp_multipliers: tuple[float, ...] | None = None
    """Factors on the gate of an MLP and on its output; None: there are none."""
    embedding_multiplier: float = 1.0
    """Factor on the word embeddings, rounded to their dtype."""
    residual_multiplier: float = 1.0
    """Factor on what attention and MLP add to the residual."""
    logits_scaling: float = 1.0
    """The output layer's logits are divided by it."""
    tie_word_embeddings: bool = False
    """The output layer shares the embedding's weight."""
    head: HeadKind = "causal_lm"
    """What stands on the hidden states: the vocabulary's logits, or scores of a sequence or of each token."""
    num_labels: int | None = None
    """Scores of a sequence or token; None: the head is the vocabulary's."""
    pad_token_id: int | None = None
    """The token whose embedding gets no gradient as an input; None: all get one."""
    init_method_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    """Of what attention and MLP add to the residual."""
    embedding_dropout: float = 0.0
    """Of embeddings, as long as ``hidden_dropout`` is on too."""
    learned_positions: bool = False
    """Positions are vectors of a table that are added to the embeddings; nothing rotates."""
    alibi: bool = False
    """Nothing rotates: scores grow with the position of the key, by a slope of each head's own."""
    embedding_layernorm: bool = False
    """The embeddings are normalised as layers are, with weights."""
    position_offset: int = 0
    """Rows of that table before that of the first position."""

    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_backwards: bool = False
    """Pairs of channels turn the other way round."""
    rope_scaling: JsonObject | None = None
    """HF's rope parameters without ``rope_theta`` (``rope_type``, ``factor``, ...); None: unscaled."""
    rotary_base_local: float | None = None
    """Base of the unscaled rope of ``sliding_attention`` layers; None: all layers rotate alike."""
    no_rope_freq: tuple[int, ...] | None = None
    """1 for each decoder layer without rope, 0 for one with; None: all have it."""
    window_size: int | None = None
    """Tokens each query sees in a sliding-window layer, itself included; None: all before it."""
    index_blocks: JsonObject | None = None
    """In ``sparse_attention`` layers a query of ``channels`` for each key/value head chooses ``topk`` blocks of
    ``size`` keys, the last ``local`` ones among them; None: there are no such layers."""

    linear_conv_kernel_dim: int | None = None
    """Width of the causal convolution in ``linear_attention`` layers (gated delta net); None: there are none."""
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_channel_decay: bool = False
    """Channels of keys fade by themselves, and gates are of low rank (Kimi's delta attention)."""
    linear_beta_factor: float = 1.0
    """Factor on the share of a correction that linear attention makes, which is a sigmoid."""
    linear_norm_epsilon: float | None = None
    """Of the norm of linear attention's heads; None: ``layernorm_epsilon``."""

    mamba_num_heads: int | None = None
    """Heads of ``mamba`` layers (state space models, Mamba 2); None: there are none."""
    mamba_head_dim: int | None = None
    mamba_num_groups: int | None = None
    """Groups of heads, of which each shares its inputs to states and its readings of them."""
    mamba_state_dim: int | None = None
    """Channels of the state of each channel of a head."""
    mamba_conv_kernel_dim: int | None = None
    mamba_conv_bias: bool = True
    mamba_least_step: float = 0.0
    """Steps in time are at least so long."""
    mamba_norm: Literal["gated", "before_gate", "none"] = "gated"
    """What a state space model gives is normalised with its gate, before it meets its gate, or not."""
    mamba_multipliers: tuple[float, ...] | None = None
    """Factors on the parts of its projection (gate, inputs, B, C, steps) and on its output; None: there are none."""
    mamba_beside_attention: bool = False
    """Every layer with attention has a state space model too: both take the same input and are added together."""
    attention_out_multiplier: float = 1.0
    """Factor on what attention gives there."""

    num_moe_experts: int | None = None
    moe_layer_freq: tuple[int, ...] | None = None
    """1 for each decoder layer with experts, 0 for a dense one; None: all as ``num_moe_experts`` says."""
    moe_ffn_hidden_size: int | None = None
    moe_latent_size: int | None = None
    """Channels that routed experts get and give, projected from the hidden states and back; None: these."""
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_score: Literal["top_sum", "max"] = "top_sum"
    """A group's score: the sum of its two best experts', or its best one's."""
    moe_router_topk_scaling_factor: float | None = None
    moe_router_normalised: bool = True
    """The sigmoids of a token's experts are divided by their sum."""
    sparse_mixer_jitter: float | None = None
    """Two experts are drawn in training of those so near the highest logit (SparseMixer); None: Megatron chooses."""
    input_jitter_noise: float = 0.0
    """Noise, twice, on what a SparseMixer and its experts get in training."""
    moe_apply_probs_on_input: bool = False
    """An expert's input is multiplied by its weight, not its output."""
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_shared_expert_mean: bool = False
    """What the shared expert and the others give is averaged, not added."""
    experts_beside_mlp: bool = False
    """The shared expert is the layer's MLP: it and the routed ones have norms of their own, the router factors."""
    moe_shortcut: bool = False
    """Layers come in pairs: what experts of the first give is added behind the second, as what its MLP, the shared
    expert, gives is added at once."""
    moe_identity_experts: int = 0
    """Experts without weights, which give a token back as it is; they follow the others in the router's order."""
    moe_aux_loss_coeff: float = 0.0
    """HF's ``router_aux_loss_coef``: of a loss over all layers together; arguments take Megatron's, of each layer's."""
    moe_router_load_balancing_type: str = "none"
    mtp_num_layers: int = 0
    mtp_before_final_norm: bool = False
    """Prediction layers take what the last decoder layer gives, without the final norm."""

    text_model_type: str | None = None
    """HF ``model_type`` of the text part, where the model has a vision model beside it."""
    vision: JsonObject | None = None
    """What ``config.json`` says of the vision model, its place in the text and its tokens; None: there is none."""
    mrope_section: tuple[int, ...] | None = None
    """Rotated channel pairs that follow a token's time, its row and its column; None: all follow one position."""
    mrope_interleaved: bool = False
    """The three take turns, channel by channel, instead of lying one after the other."""
    deepstack_layers: int = 0
    """After so many first decoder layers, features of inner layers of the vision model are added to image tokens."""

    extra: JsonObject = field(default_factory=dict)
    """Family-specific facts that have no Megatron name, under HF's names."""
    hf_config: JsonObject = field(default_factory=dict)
    """The source ``config.json`` verbatim; export starts from it, so unknown fields survive."""
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    """The parallel sizes a checkpoint was written with."""

    def __post_init__(self) -> None:
        require_numbers(self)
        require_bounded(vars(self))
        require_fitting(vars(self))

    @property
    def has_own_norms(self) -> bool:
        """Whether the norms around attention and MLP are modules of our own, which no linear can hold."""
        biased = self.normalization == "RMSNorm" or self.norm_bias
        shared = self.parallel_block != "none" or self.mamba_beside_attention
        return shared or not self.norm_weight or not biased

    @property
    def attention_biases(self) -> bool:
        """Whether all linears of attention have biases."""
        return self.add_bias_linear if self.add_bias_attention is None else self.add_bias_attention

    @property
    def value_width(self) -> int:
        """Channels of a head's values."""
        return self.kv_channels if self.value_channels is None else self.value_channels

    @property
    def has_own_heads(self) -> bool:
        """Whether queries, keys and values are made otherwise than Megatron makes them, or by layer."""
        other = self.values_are_keys or self.value_norm or self.value_scale != 1.0
        other = other or self.takes_keys or self.num_kv_shared_layers > 0
        by_layer = any(set(own) - {"norm_placement"} for own in (self.of_kind or {}).values())
        return other or by_layer or self.value_width != self.kv_channels

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder ``layer`` has experts."""
        chosen = self.moe_layer_freq
        return self.num_moe_experts is not None and (chosen is None or bool(chosen[layer]))

    @property
    def num_router_choices(self) -> int:
        """Experts that a router knows, with weights or without."""
        return (self.num_moe_experts or 0) + self.moe_identity_experts

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows of all tensor ranks together: the least multiple of tp that holds the true ones."""
        return -(-self.vocab_size // self.layout.tp) * self.layout.tp

    def pipeline_plan(self) -> PipelinePlan:
        """Which layers stand on which pipeline rank and virtual stage of :attr:`layout`."""
        return pipeline_plan(self.layout, self.num_layers, self.mtp_num_layers)

    def distribute_config_match(self, other: "McaModelConfig") -> bool:
        """Whether every rank holds the same pieces under both layouts, so that files map directly.

        Only tp, the layers of each pipeline rank and, with experts, their sizes matter.
        """
        mine, its = self.layout, other.layout
        experts = self.num_moe_experts is not None and (mine.ep, mine.etp) != (its.ep, its.etp)
        return mine.tp == its.tp and not experts and self._held_by_rank() == other._held_by_rank()

    def _held_by_rank(self) -> list[tuple[set[int], set[int]]]:
        plan = self.pipeline_plan()
        return [
            (set(plan.layers_of_rank(pp)), {index for chunk in chunks for index in chunk.mtp_layers})
            for pp, chunks in enumerate(plan.chunks)
        ]

    def to_dict(self) -> JsonObject:
        """The contents of ``mca_config.json``."""
        model = fields.to_json(self)
        beside = {"layout": fields.to_json(model.pop("layout")), "hf_config": model.pop("hf_config")}
        return {"mca_version": VERSION, "model": model, **beside}

    def to_json(self) -> str:
        """The text of ``mca_config.json``."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_dict(document: JsonObject, where: str = FILE_NAME) -> "McaModelConfig":
        """Reads what :meth:`to_dict` or ROLL's mcore_adapter wrote, of any class; ``where`` names it in errors."""
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
            for kind, own in (config.of_kind or {}).items():
                require_object(own, f"of_kind {kind}")
                fields.from_json(cls, {**model, "of_kind": None, **own}, f"{where}: of_kind {kind}")
            require_rope(config.rope_scaling)
        except McaError as error:
            raise named(error, where) from None
        return config

    @staticmethod
    def from_json(text: str, where: str = FILE_NAME) -> "McaModelConfig":
        """:meth:`from_dict` of JSON ``text``."""
        return McaModelConfig.from_dict(files.parse_object(text, where), where)

    def save(self, directory: str | Path) -> Path:
        """Writes ``mca_config.json`` into ``directory`` and returns its path."""
        (path := Path(directory) / FILE_NAME).write_text(self.to_json(), encoding="utf-8")
        return path

    @staticmethod
    def load(directory: str | Path) -> "McaModelConfig":
        """Reads ``directory``'s ``mca_config.json``."""
        path = files.inside(Path(directory), FILE_NAME)
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
    """Files have what is rotated in two halves, whose channels pair up, not in pairs of neighbours as Megatron has."""
    query_multiplier: float = 1.0
    """Factor on queries."""
    latent_multiplier: float = 1.0
    """Factor on compressed keys and values behind their norm; the rotated channels of keys have none."""
    index_topk: int | None = None
    """Keys that an indexer chooses for each query; None: a query sees all before it."""
    index_num_heads: int | None = None
    index_head_dim: int | None = None
    index_rotary_interleaved: bool = False
    """The indexer rotates pairs of neighbours."""


def trained_dtype(config: McaModelConfig, args: object) -> DtypeName:
    """What a model is trained in: what training arguments say, else the dtype of its files."""
    flags = vars(args)  # bf16 and fp16 are there in training arguments only
    return "bfloat16" if flags.get("bf16") else "float16" if flags.get("fp16") else config.dtype
