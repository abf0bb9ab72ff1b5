"""Features of audio clips, computed by transformers' audio tower and projector."""

import torch
from torch import Tensor

from mca_config.types import JsonObject
from mca_models.megatron.types import HfModel


def run_audio(model: HfModel, clips: JsonObject) -> Tensor:
    """Return the features of all clips, one after the other: ``[rows, hidden]``.

    Args:
        model: Transformers' model without its text model.
        clips: Arguments of the audio tower by name.
    """
    if not hasattr(model, "get_audio_features"):
        return _run_masked(model, **clips)
    output = model.get_audio_features(**clips, return_dict=True)
    features = output.pooler_output if output.get("pooler_output") is not None else output.last_hidden_state
    if (inside := output.get("attention_mask")) is not None:
        kept: Tensor = features[inside]
        return kept
    flat: Tensor = features.flatten(0, -2)
    return flat


def _run_masked(model: HfModel, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
    """Return what ``Qwen2AudioModel`` computes within its own forward pass.

    Args:
        model: The model.
        input_features: Mel spectrograms, ``[clips, mels, frames]``.
        feature_attention_mask: Frames of each clip, ``[clips, frames]``.
    """
    from transformers.masking_utils import create_bidirectional_mask

    tower = model.audio_tower
    inner, rows = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    length = (input_features.shape[-1] - 2) // 2 + 1
    inside = torch.arange(length, device=inner.device) < inner[:, None]
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(*inside.shape, 1),
        attention_mask=inside.long(),
    )
    features: Tensor = model.multi_modal_projector(
        tower(input_features, attention_mask=mask).last_hidden_state
    )
    return features[torch.arange(features.shape[1], device=rows.device) < rows[:, None]]
