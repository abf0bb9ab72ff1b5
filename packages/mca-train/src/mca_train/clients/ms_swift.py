"""Backend ``mca`` of ms-swift's Megatron trainer; ``docs/other_programs.md`` has the patch of ms-swift that calls it.

mca builds, fills and exports the model; ms-swift trains it with its loop, optimizer and ``torch_dist`` checkpoints.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, get_args

import torch
from torch import Tensor

from mca_config.arguments import DistributingParallelArguments
from mca_config.errors import McaError, raise_problems
from mca_config.model_config import DtypeName
from mca_config.types import JsonObject
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.megatron.auto import AutoModel
from mca_models.megatron.factory import fill
from mca_models.megatron.factory.transformer_config import DTYPES
from mca_models.megatron.virtual_models import VirtualModels
from mca_models.templates import config_from_hf
from mca_train.clients.external_loop import require_plain_loop, save_among
from mca_train.types import Chunk, Upstream

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
    "additional_configs": "megatron_extra_kwargs",
}
"""ms-swift's names of mca's arguments; the others have Megatron's names in both."""

_ONLY: dict[str, tuple[object, ...]] = {
    "tuner_type": ("full",),
    "task_type": ("causal_lm",),
    "rlhf_type": (None,),
    "is_multimodal": (False,),
    "mtp_num_layers": (None, 0),
    "cp_partition_mode": ("zigzag",),
    "router_replay_mode": ("disabled",),
    "calculate_per_token_loss": (True,),
    "fp4_format": (None,),
}
"""Values of ms-swift's arguments that the backend supports."""

_NEEDS = {
    "moe_token_drop_policy": "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity": "moe_expert_capacity_factor",
    "fp8_recipe": "fp8",
    "fp8_param": "fp8",
}
"""Arguments to which ms-swift gives a default although the other one, without which they do nothing, is unset."""

Converter = Callable[[str, Tensor], tuple[str, Tensor] | None]


class SwiftArguments(Protocol):
    """The arguments of ``megatron sft`` and ``megatron pt``, of which mca reads what it knows."""

    model_dir: str | None
    torch_dtype: torch.dtype
    seed: int


def get_mcore_model(args: SwiftArguments, hf_config: "PretrainedConfig") -> list[Chunk]:
    """Return this rank's chunks, unfilled, each with a `Bridge` as ``config.bridge``; collective.

    Raises:
        McaError: mca does not support the model, its layout or an option of ms-swift.
    """
    raise_problems(_problems(args), "ms-swift with bridge_backend mca")
    config = config_from_hf(json.loads(hf_config.to_json_string()))
    ours = DistributingParallelArguments(**_arguments(args))
    dtype = next(name for name in get_args(DtypeName) if DTYPES[name] == args.torch_dtype)
    models = AutoModel.unfilled(config, ours, dtype=dtype, seed=args.seed)
    require_plain_loop(models)
    megatron: Upstream = models.megatron
    megatron.calculate_per_token_loss = True
    megatron.variable_seq_lengths = True
    megatron.swiglu = config.mlp.gated_linear_unit and config.mlp.hidden_act == "silu"
    megatron.bridge = Bridge(models)
    return [*models.chunks]


def _problems(args: SwiftArguments) -> Iterator[str]:
    for name, supported in _ONLY.items():
        value = getattr(args, name, supported[0])
        if value not in supported:
            choices = " or ".join(map(str, supported))
            yield f"{name} {value} is not supported; set {choices}, or bridge_backend mcore-bridge"


def _arguments(args: SwiftArguments) -> JsonObject:
    """Return mca's arguments with ms-swift's values; what ms-swift leaves open keeps mca's default."""
    found: JsonObject = {}
    for field in dataclasses.fields(DistributingParallelArguments):
        value = getattr(args, _RENAMED.get(field.name, field.name), None)
        if value not in (None, [], "none"):
            found[field.name] = getattr(value, "name", value)  # attention_backend is an enum
    return {name: value for name, value in found.items() if _NEEDS.get(name, name) in found}


class Bridge:
    """Bridge object by ms-swift's signatures: reads and writes Hugging Face weights of a model's chunks.

    Args:
        models: The model whose chunks have this bridge.
    """

    def __init__(self, models: VirtualModels) -> None:
        self.models = models

    def load_weights(
        self,
        models: Sequence[Chunk],
        hf_model_dir: str,
        peft_format: bool = False,
        adapter_name: str = "default",
    ) -> None:
        """Fill ``models`` from a checkpoint directory; each rank reads its own slices. Collective.

        Args:
            models: All chunks of one model on this rank, which need not be the model of this bridge.
            hf_model_dir: A Hugging Face, MCA or torch_dist directory of the same model.
            peft_format: Must be False.
            adapter_name: Ignored without ``peft_format``.

        Raises:
            McaError: The directory is incomplete or holds another model.
        """
        _reject_adapter(peft_format)
        ours, source = _virtual_models(models), open_checkpoint(Path(hf_model_dir))
        fill.require_same_names(source, ours.config, hf_model_dir)
        context = ours.rank_context
        ours.bytes_read = fill.from_source(source, ours.local_params(), context.layout, context.coordinates)
        ours.source = Path(hf_model_dir)

    def export_weights(
        self,
        models: Sequence[Chunk],
        target_device: str | torch.device | None = None,
        only_master_rank: bool = False,
        peft_format: bool = False,
        adapter_name: str = "default",
        converter: Converter | None = None,
        skip_unsupported_export: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors; collective, every rank iterates to the end.

        Args:
            models: All chunks of one model on this rank.
            target_device: Device of the tensors; None: the model's.
            only_master_rank: Only rank 0 receives tensors.
            peft_format: Must be False.
            adapter_name: Ignored without ``peft_format``.
            converter: Maps a name and its tensor to others, or to None to leave the tensor out.
            skip_unsupported_export: Ignored: mca exports every weight.
        """
        _reject_adapter(peft_format)
        ours = _virtual_models(models)
        for name, tensor in ours.export_weights(to="first" if only_master_rank else "all"):
            pair = (name, tensor) if converter is None else converter(name, tensor)
            if pair is not None:
                yield pair[0], pair[1] if target_device is None else pair[1].to(target_device)

    def save_weights(
        self,
        models: Sequence[Chunk],
        output_dir: str,
        peft_format: bool = False,
        args: SwiftArguments | None = None,
        processor: object = None,
        save_missing_weights: str | bool | None = False,
    ) -> None:
        """Write a Hugging Face checkpoint among the files of ``output_dir``; collective.

        Args:
            models: All chunks of one model on this rank.
            output_dir: Directory that ms-swift made for its own checkpoint.
            peft_format: Must be False.
            args: ms-swift's arguments; ``model_dir`` has the tokenizer if the weights came from elsewhere.
            processor: Ignored: tokenizer and other files are copied from the checkpoint that was loaded.
            save_missing_weights: Must be false.
        """
        _reject_adapter(peft_format)
        if save_missing_weights:
            raise McaError(f"save_missing_weights {save_missing_weights} is not supported; set it to false")
        ours, folder = _virtual_models(models), Path(output_dir)
        if ours.source is None and args is not None and args.model_dir:
            ours.source = Path(args.model_dir)
        save_among(lambda staged: ours.save_pretrained_as_hf(staged, overwrite=True), folder)


def _reject_adapter(peft_format: bool) -> None:
    if peft_format:
        raise McaError("adapters are not supported by bridge_backend mca; set tuner_type to full")


def _virtual_models(chunks: Sequence[Chunk]) -> VirtualModels:
    """Return the model with these chunks, or with the chunks in their wrappers."""
    bridge = getattr(chunks[0].config, "bridge", None) if chunks else None
    if not isinstance(bridge, Bridge):
        raise McaError(
            "the chunks are not of bridge_backend mca; pass the chunks that get_mcore_model returned"
        )
    if len(chunks) != len(bridge.models):
        raise McaError(
            f"{len(chunks)} of {len(bridge.models)} chunks of this rank were passed; pass all, or set "
            "virtual_pipeline_model_parallel_size to 1"
        )
    return bridge.models
