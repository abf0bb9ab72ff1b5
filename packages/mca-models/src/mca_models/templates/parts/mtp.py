"""Rules of MTP layers, which HF numbers after the decoder's.

How their loss is computed is the trainer's matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import Fixed
from mca_models.templates.parts.names import HF, HF_EMBEDDING, HF_HEAD
from mca_models.weights import COLUMN, REPLICATED, Param, Stage

DECODER, MTP = "decoder.layers.{layer}.", "mtp.layers.{layer}."


MTP_NAMES = {"enorm": f"{HF}enorm", "hnorm": f"{HF}hnorm", "eh_proj": f"{HF}eh_proj"}
MTP_NAMES["final_layernorm"] = f"{HF}shared_head.norm"


def mtp_params(
    config: McaModelConfig, inside: Sequence[Param], own: Mapping[str, str] = MTP_NAMES, prefix: str = HF
) -> list[Param]:
    """Every MTP layer.

    Args:
        config: The model.
        inside: The rules of the decoder layer within it, expert by expert.
        own: HF's names of the parts around that layer.
        prefix: What HF's names of that layer begin with; numbered after the decoder's if as those.
    """
    around = [
        Param(
            mca=f"{MTP}{name}.weight", hf=(f"{hf}.weight",), shard=COLUMN if name == "eh_proj" else REPLICATED
        )
        for name, hf in own.items()
    ]
    moved = [
        replace(
            rule,
            mca=rule.mca.replace(DECODER, f"{MTP}transformer_layer."),
            hf=tuple(name.replace(HF, prefix) for name in rule.hf),
        )
        for rule in inside
    ]
    first = config.num_layers if prefix == HF else 0
    return [
        replace(rule, stage=Stage.MTP, layer=layer, hf_layer=first + layer)
        for layer in range(config.mtp_num_layers)
        for rule in (*around, *moved)
    ]


def mtp_copies(config: McaModelConfig) -> dict[str, str]:
    """Tensors that HF files repeat inside each MTP layer, and what they repeat."""
    layers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    head = HF_EMBEDDING if config.head.tie_word_embeddings else HF_HEAD
    copies = {f"{HF}embed_tokens.weight": HF_EMBEDDING, f"{HF}shared_head.head.weight": head}
    return {name.format(layer=layer): source for layer in layers for name, source in copies.items()}


OWN_EMBEDDING = Fixed(
    "mtp_use_dedicated_embeddings", (False,), "Megatron's MTP layers share the model's embedding"
)
