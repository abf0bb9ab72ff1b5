"""HF names of the parts of a model.

Megatron's names are in the rules, those of its live modules in `live_names`.
"""

from dataclasses import dataclass, replace

from mca_models.weights import SEPARATE, Layout

HF = "model.layers.{layer}."
HF_ATTN, HF_MLP = HF + "self_attn.", HF + "mlp."
HF_EMBEDDING, HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"
HF_HEAD_BIAS = "lm_head.bias"

# where transformers' modules (5.x) have all experts of a layer in one tensor
FUSED = "mlp.experts."

TRANSPOSED_EXPERTS = "the weights of its experts lie as [in, out]"


@dataclass(frozen=True, kw_only=True)
class MoeNames:
    """HF names inside an expert layer, after ``model.layers.{layer}.``."""

    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    bias_layout: Layout = SEPARATE
    experts: str = "mlp.experts."
    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    shared: str = "mlp.shared_experts."
    post_norm: str = "post_mlp_layernorm.weight"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    in_memory: tuple[tuple[str, str], ...] = (("block_sparse_moe.", "mlp."),)
    """Names in transformers' modules (5.x) that differ from the checkpoint's."""

    def loaded(self, name: str) -> str:
        """Return the name of transformers' modules (5.x) for the files' ``name``."""
        for old, new in self.in_memory:
            name = name.replace(old, new)
        return name


QK_NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


BLOCK_SPARSE = MoeNames(
    router="block_sparse_moe.gate.weight",
    experts="block_sparse_moe.experts.",
    gate="w1.weight",
    up="w3.weight",
    down="w2.weight",
)


BLOCK_SPARSE_BIASED = replace(BLOCK_SPARSE, router_bias="block_sparse_moe.e_score_correction_bias")
