"""Features of audio clips, computed by transformers' audio tower and projector."""

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.megatron.types import HfModel
from mca_models.templates.parts.vision_tower import AudioTower


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


def run_clips(model: HfModel, clips: JsonObject, config: McaModelConfig, audio: AudioTower) -> Tensor:
    """Return the features of all clips, with those of clips shorter than a chunk as if they were alone.

    Args:
        model: Transformers' model without its text model.
        clips: Arguments of the audio tower by name.
        config: Configuration of the model.
        audio: Its audio tower.
    """
    if audio.chunk is None or audio.mask is None:
        return run_audio(model, clips)
    frames, chunk = clips[audio.mask].sum(1).tolist(), audio.chunk(config)
    groups = [[number] for number, count in enumerate(frames) if count < chunk]
    if full := [number for number, count in enumerate(frames) if count >= chunk]:
        groups.append(full)
    found: dict[int, Tensor] = {}
    for group in groups:
        made = run_audio(model, {name: each[group] for name, each in clips.items()})
        rows = [audio.tokens(config, frames[number]) for number in group]
        found |= zip(group, made.split(rows), strict=True)
    return torch.cat([found[number] for number in range(len(frames))])


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
