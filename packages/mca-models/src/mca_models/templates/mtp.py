"""Rules of multi-token-prediction layers, which HF numbers after the decoder's."""

from collections.abc import Sequence
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates.names import HF, HF_EMBEDDING, HF_HEAD
from mca_models.weights import COLUMN, Param, Stage

DECODER, MTP = "decoder.layers.{layer}.", "mtp.layers.{layer}."


def mtp_params(config: McaModelConfig, inside: Sequence[Param]) -> list[Param]:
    """Every prediction layer; ``inside`` are the rules of the decoder layer within it, expert by expert."""
    own = [
        Param(mca=f"{MTP}enorm.weight", hf=(f"{HF}enorm.weight",)),
        Param(mca=f"{MTP}hnorm.weight", hf=(f"{HF}hnorm.weight",)),
        Param(mca=f"{MTP}eh_proj.weight", hf=(f"{HF}eh_proj.weight",), shard=COLUMN),
        Param(mca=f"{MTP}final_layernorm.weight", hf=(f"{HF}shared_head.norm.weight",)),
    ]
    moved = [replace(rule, mca=rule.mca.replace(DECODER, f"{MTP}transformer_layer.")) for rule in inside]
    return [
        replace(rule, stage=Stage.MTP, layer=layer, hf_layer=config.num_layers + layer)
        for layer in range(config.mtp_num_layers)
        for rule in (*own, *moved)
    ]


def mtp_copies(config: McaModelConfig) -> dict[str, str]:
    """Tensors that HF files repeat inside each prediction layer, and what they repeat."""
    layers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    head = HF_EMBEDDING if config.tie_word_embeddings else HF_HEAD
    copies = {f"{HF}embed_tokens.weight": HF_EMBEDDING, f"{HF}shared_head.head.weight": head}
    return {name.format(layer=layer): source for layer in layers for name, source in copies.items()}
