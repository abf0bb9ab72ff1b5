"""The vision model of a chunk: transformers' own class, without its text model.

Its parameters have the names of transformers' modules below ``vision_model.``. How its features come into the text is
not known here.
"""

import copy
from collections.abc import Mapping
from typing import Literal

import torch

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.megatron.types import GptModel, HfModel
from mca_models.templates import config_to_hf, get_family
from mca_models.templates.vision_tower import PREFIX
from mca_models.weights import Param, Stage

_NO_TEXT: Mapping[str, object] = {"num_hidden_layers": 0, "vocab_size": 1, "pad_token_id": None}
_OF_LAYERS = ("layer_types", "mlp_layer_types", "mlp_only_layers", "no_rope_layers")


Part = Literal["language", "vision", "projector"]
"""What can be trained or left as it is: the text model, the tower, and what brings its features into the text."""
TEXT: tuple[Part, ...] = ("language",)
"""The parts that adapters are for by default."""


def model_part(param: Param, config: McaModelConfig) -> str:
    """Which `Part` a parameter belongs to; ``unused`` if nothing depends on it."""
    if param.stage is not Stage.VISION:
        return "language"
    vision = get_family(config.model_type).vision
    return "unused" if vision is None else vision.component(param.mca.removeprefix(PREFIX))


def add_vision_tower(model: GptModel, config: McaModelConfig) -> None:
    """Gives a chunk with the embedding its vision model, which is frozen until it is selected."""
    if config.vision is None or not model.pre_process:
        return
    model.vision_model = vision_model(config, model.config.params_dtype)
    model.vision_model.requires_grad_(False)


def vision_model(config: McaModelConfig, dtype: torch.dtype) -> HfModel:
    """The model of ``config`` in transformers without its text, its parameters not yet filled."""
    import transformers
    from transformers.initialization import no_init_weights

    described = transformers.AutoConfig.for_model(**copy.deepcopy(without_text(config_to_hf(config))))
    with no_init_weights():
        model: HfModel = transformers.AutoModel.from_config(described, dtype=dtype)
    del model.language_model
    return model


def without_text(hf: JsonObject) -> JsonObject:
    """``config.json`` with a text part of no layers; what vision models look at stays."""
    if "text_config" in hf:
        return {**hf, "text_config": without_text(hf["text_config"])}
    return {**{key: value for key, value in hf.items() if key not in _OF_LAYERS}, **_NO_TEXT}
