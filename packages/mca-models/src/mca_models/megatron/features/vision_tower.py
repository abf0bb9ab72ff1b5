"""Vision tower of a chunk: transformers' own class, without its text model.

Its parameters have the names of transformers' modules below ``vision_model.``. Its features are added to the text in
`images`.
"""

import copy
from collections.abc import Mapping

import torch

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.types import GptModel, HfModel
from mca_models.templates import config_to_hf, get_family

_NO_TEXT: Mapping[str, object] = {"num_hidden_layers": 0, "vocab_size": 1, "pad_token_id": None}
_PER_LAYER = ("layer_types", "per_layer_config", "mlp_layer_types", "mlp_only_layers", "no_rope_layers")


def add_vision_tower(model: GptModel, config: McaModelConfig) -> None:
    """Add the vision tower to a chunk with the embedding, frozen until it is selected for training."""
    if config.vision is None or not model.pre_process:
        return
    model.vision_model = vision_model(config, model.config.params_dtype)
    model.vision_model.requires_grad_(False)


def vision_model(config: McaModelConfig, dtype: torch.dtype) -> HfModel:
    """Build transformers' model of ``config`` without its text model; its parameters are not filled."""
    import transformers
    from transformers.initialization import no_init_weights

    config_without_text = transformers.AutoConfig.for_model(
        **copy.deepcopy(without_text(config_to_hf(config)))
    )
    if type(config_without_text) not in transformers.MODEL_MAPPING:
        raise McaError(
            f"{config.model_type}: transformers {transformers.__version__} has no model of its features alone; "
            "install a newer version"
        )
    with no_init_weights():
        model: HfModel = transformers.AutoModel.from_config(config_without_text, dtype=dtype)
    # Voxtral builds its position embeddings in fp32; files have them in the dtype of all others
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    family = get_family(config.model_type).vision
    assert family is not None, "a model with a vision configuration has a vision model"
    delattr(model, family.text_module)
    if family.fused_qkv:
        for module in [*model.vision_tower.layers.modules()]:
            if hasattr(module, "q_proj"):
                _fuse_qkv(module, turned=family.fused_qkv == "rope pairs")
    return model


def _fuse_qkv(attention: HfModel, *, turned: bool) -> None:
    """Keep q, k and v in one linear, as the checkpoint has them; ``turned``: with RoPE pairs next to each other."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    fused = torch.nn.Linear(1, 1, bias=projections[0].bias is not None)
    for leaf, _ in [*fused.named_parameters()]:
        joined = torch.cat([getattr(each, leaf).detach() for each in projections])
        setattr(fused, leaf, torch.nn.Parameter(joined))
    attention.wqkv = fused
    half = attention.head_dim // 2 if turned else 0
    attention.q_proj, attention.k_proj, attention.v_proj = (
        _FusedProjection(fused, part, half if part < 2 else 0) for part in range(3)
    )


class _FusedProjection(torch.nn.Module):
    """One of q, k and v of a fused linear.

    Args:
        fused: The linear, which remains a module of the attention alone.
        part: 0, 1 or 2.
        half: RoPE pairs of a head, whose channels are neighbours in ``fused``; 0: none.
    """

    def __init__(self, fused: torch.nn.Linear, part: int, half: int) -> None:
        super().__init__()
        self._fused, self._part, self._half = (fused,), part, half

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the projection of ``hidden``.

        The first channels of all pairs of a head come before the second, if the linear has RoPE pairs next to each
        other.
        """
        (fused,) = self._fused
        mine = [
            each.chunk(3)[self._part]
            for each in (fused.weight, *([] if fused.bias is None else [fused.bias]))
        ]
        if self._half:
            mine = [each.unflatten(0, (-1, self._half, 2)).transpose(1, 2).flatten(0, 2) for each in mine]
        return torch.nn.functional.linear(hidden, *mine)


def without_text(hf: JsonObject) -> JsonObject:
    """Return ``config.json`` with an empty text model; keys that vision models read stay."""
    if "text_config" in hf:
        return {**hf, "text_config": without_text(hf["text_config"])}
    return {**{key: value for key, value in hf.items() if key not in _PER_LAYER}, **_NO_TEXT}


VISION_TOWER = Feature(
    name="vision tower", enabled=lambda config: config.vision is not None, finish=add_vision_tower
)
