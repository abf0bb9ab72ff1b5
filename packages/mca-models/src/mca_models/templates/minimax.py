"""MiniMax-Text-01: HF ``MiniMaxForCausalLM``: lightning attention in most layers, Mixtral's experts.

The residual stream goes through the norms, with factors.
"""

from itertools import chain

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import ConfigTable, Field, HfConfig
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import attention, embedding, head
from mca_models.templates.parts.lightning_attention import lightning_attention
from mca_models.templates.parts.moe import mlp_layers
from mca_models.templates.parts.names import BLOCK_SPARSE
from mca_models.weights import Param, expand_rules

MIXTRAL = get_family("mixtral")
_LINEAR, _FULL = "linear_attention", "full_attention"
_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def _kinds(hf: HfConfig) -> list[str]:
    layers = range(hf["num_hidden_layers"])
    return list(hf.get("layer_types") or [_LINEAR if layer % 2 else _FULL for layer in layers])


def read(hf: HfConfig) -> JsonObject:
    """Derive the kinds of layers, and the sizes of lightning attention and the factors of both kinds."""
    kinds = _kinds(hf)
    factors = {
        part: tuple(
            hf.get(f"{'linear' if kind == _LINEAR else 'full'}_attn_{name}_factor", 1) for kind in kinds
        )
        for part, name in (("residual", "alpha"), ("output", "beta"))
    }
    heads = hf["num_attention_heads"]
    return {
        "layer_types": tuple("lightning" if kind == _LINEAR else kind for kind in kinds),
        "lightning_num_heads": heads,
        "lightning_head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        **{f"attention_{part}_factors": found for part, found in factors.items()},
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    kinds = [_LINEAR if kind == "lightning" else kind for kind in values["layer_types"]]
    found: HfConfig = {"layer_types": kinds}
    for part, name in (("residual", "alpha"), ("output", "beta")):
        factors = values[f"attention_{part}_factors"]
        for kind, factor in zip(kinds, factors, strict=True):
            found[f"{'linear' if kind == _LINEAR else 'full'}_attn_{name}_factor"] = factor
    return found


def ignored(config: McaModelConfig) -> frozenset[str]:
    """Return the tables of decays that transformers saves, and computes itself."""
    layers = [i for i in range(config.num_layers) if config.is_lightning_layer(i)]
    return frozenset(f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in _BUFFERS)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    kinds = {True: lightning_attention(config), False: attention(config)}
    layers = (
        expand_rules(kinds[config.is_lightning_layer(layer)], layers=[layer])
        for layer in range(config.num_layers)
    )
    return [embedding(), *chain.from_iterable(layers), *mlp_layers(config, BLOCK_SPARSE), *head(config)]


FAMILY = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    config=ConfigTable(
        fields=(
            *MIXTRAL.table.fields,
            Field("mlp_residual_factor", "mlp_alpha_factor", 1),
            Field("mlp_output_factor", "mlp_beta_factor", 1),
        ),
        defaults=MIXTRAL.table.defaults,
        constants={"normed_residual": True},
        fixed=MIXTRAL.table.fixed,
        aliases=MIXTRAL.table.aliases,
        facts=(*MIXTRAL.table.facts, Lens(read, write)),
    ),
    params=params,
    moe=BLOCK_SPARSE,
    ignored_hf=ignored,
)
