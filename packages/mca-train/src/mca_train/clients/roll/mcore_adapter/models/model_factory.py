"""``AutoModel`` and ``VirtualModels`` by ROLL's methods: a list of the rank's chunks, with Megatron's configuration.

`MediaInputs` makes the images and videos of ROLL's micro-batches the arguments of the chunks.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as McaGPTModel
from torch import Tensor

import mca_models
from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.media import placeholders, positions
from mca_models.megatron.distributed import parallel
from mca_models.megatron.features.sequence_media import media_joiner
from mca_models.megatron.layers.zigzag import take_rank_tokens
from mca_models.megatron.peft import PeftModels
from mca_models.megatron.tensors import weights_dtype
from mca_models.megatron.virtual_models import CheckpointFormat
from mca_models.templates.parts.vision_language import model_parts
from mca_train.checkpoint.model import load_weights
from mca_train.clients.chunk_lora import attach
from mca_train.clients.external_loop import MODEL_FOLDER, require_plain_loop, save_among
from mca_train.clients.sample_media import MEDIA_INPUTS, ROLL, BatchMedia
from mca_train.data.sample_images import SampleImages
from mca_train.types import Chunk, Upstream

from .router_replay import enable_router_replay

if TYPE_CHECKING:
    from mca_train.clients.roll.mcore_adapter import TrainingArguments

__all__ = ["AutoModel", "McaGPTModel", "VirtualModels"]

_UNCUT = ("input_ids", "attention_mask")
"""Tensors that every context-parallel rank passes to a chunk in full, since the media are located in them."""
_NAMES = {name for names in MEDIA_INPUTS.values() for name in names}
_DERIVED = {"second_per_grid_ts", "mm_token_type_ids", "force_vit_image", "force_vit_video", "loss_mask"}
"""Inputs that follow from tokens and positions, or that mca does not need."""


def _do_nothing(*_: object) -> None:
    """Take the place of a method that ROLL calls and mca does not need."""


class VirtualModels:
    """Chunks of a rank, of which ROLL wraps, trains and sends each by itself.

    Its ``config`` is Megatron's; ``models`` may be replaced by the chunks' DDP wrappers.

    Args:
        model: mca's model.
        seed: Seed of a new adapter's values.
    """

    def __init__(self, model: mca_models.VirtualModels, seed: int) -> None:
        require_plain_loop(model, media=True)
        self.model, self._seed = model, seed
        if model.config.vision is not None:
            model.train_parts(model_parts(model.config))  # ROLL freezes by freeze_module_prefix
        self.models: list[Chunk] = [*model.chunks]
        config: Upstream = model.megatron
        config.calculate_per_token_loss = False  # ROLL's losses are means
        config.hf_model_type, config.mca_models = model.config.model_type, model
        self.config = config
        for chunk in self.models:
            if model.config.vision is not None:
                MediaInputs(chunk, model.config)
            chunk.get_batch_on_this_cp_rank = self.get_batch_on_this_cp_rank
            chunk.save_pretrained = self.save_pretrained
            chunk.attach_lora, chunk.mca_config = self.attach_lora, model.config
            chunk.enable_input_require_grads = _do_nothing  # a model with an adapter does it

    def attach_lora(self, config: Upstream) -> PeftModels:
        """Attach a new adapter, by which saving, loading and sending act on the adapter alone; return it.

        Args:
            config: ``peft.LoraConfig``.
        """
        adapted = attach(self.model, config, self._seed)
        self.model = self.config.mca_models = adapted
        self.config.save_pretrained = (
            _do_nothing  # ROLL writes it among adapters, which are of one base model
        )
        return adapted

    def get_models(self) -> list[Chunk]:
        """Return the chunks, or their wrappers."""
        return self.models

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, index: int) -> Chunk:
        return self.models[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.models)

    def train(self, mode: bool = True) -> None:
        """Set training mode."""
        for model in self.models:
            model.train(mode)

    def eval(self) -> None:
        """Set evaluation mode."""
        self.train(False)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the shards of this rank."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield Megatron's names in each chunk, and shards."""
        for model in self.models:
            yield from model.named_parameters()

    def get_batch_on_this_cp_rank(
        self, batch: dict[str, Tensor], dim3_keys: tuple[str, ...] | list[str] = ("attention_mask",)
    ) -> dict[str, Tensor]:
        """Return this context-parallel rank's tokens of each tensor; inputs of a model with images stay whole.

        Args:
            batch: Tensors ``[b, s, ...]``.
            dim3_keys: Tensors ``[b, 1, s, ...]``.
        """
        group, whole = parallel.context_group(), _UNCUT if self.model.config.vision is not None else ()
        return {
            name: x
            if name in whole
            else take_rank_tokens(x, 2 if name in dim3_keys else 1, group.rank(), group.size())
            for name, x in batch.items()
        }

    def save_pretrained(self, directory: str, state_dict: object = None, ckpt_format: str = "mca") -> None:
        """Write all chunks in mca's format (or ``torch_dist``) below ``directory``; collective."""
        form: CheckpointFormat = "torch_dist" if ckpt_format == "torch_dist" else "mca"
        self.model.save_pretrained(Path(directory) / MODEL_FOLDER, overwrite=True, ckpt_format=form)

    def save_pretrained_as_hf(self, directory: str) -> None:
        """Write a Hugging Face checkpoint among the files of ``directory``; collective."""
        save_among(lambda folder: self.model.save_pretrained_as_hf(folder, overwrite=True), Path(directory))

    def load_state_dict(self, state_dict: Path) -> None:
        """Fill all chunks from the directory that ``load_state_dict_from_checkpoint`` returned."""
        load_weights(self.model, state_dict)

    def sharded_state_dict(self) -> JsonObject:
        """Return Megatron's sharded state of each chunk, by which the optimizer's state is sharded."""
        if len(self.models) == 1:
            return {"model": self.models[0].sharded_state_dict()}
        states: JsonObject = {}
        for stage, model in enumerate(self.models):
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
            states[f"model{stage}"] = model.sharded_state_dict()
        return states


class AutoModel:
    """Factory of ``VirtualModels``."""

    @staticmethod
    def from_pretrained(path: str | Path, args: "TrainingArguments") -> VirtualModels:
        """Return the model of a Hugging Face, MCA or Megatron directory; collective."""
        args.require_supported()
        models = VirtualModels(mca_models.AutoModel.from_pretrained(path, args), args.seed)
        if args.moe_enable_routing_replay:
            enable_router_replay(models.model)
        return models


class MediaInputs:
    """Forward pre-hook of a chunk that locates the media of a micro-batch and cuts its tokens.

    Args:
        chunk: The chunk.
        config: Configuration of the model.

    Raises:
        McaError: The model's media have no grids, by which ROLL's joined inputs are divided among sequences.
    """

    def __init__(self, chunk: Chunk, config: McaModelConfig) -> None:
        if config.mrope is None or "spatial_merge_size" not in config.hf_config.get("vision_config", {}):
            raise McaError(
                f"images of {config.model_type} are not supported with ROLL, which joins those of a micro-batch; use a "
                "Qwen-VL model, or mca-train"
            )
        self._config = config
        self._join = media_joiner(config, decodes=chunk.pre_process).join
        self._tokens = torch.tensor(list(placeholders(config.vision_fields).values()))
        chunk.register_forward_pre_hook(self.before_chunk, with_kwargs=True, prepend=True)

    def before_chunk(
        self, chunk: Chunk, args: tuple[object, ...], kwargs: JsonObject
    ) -> tuple[tuple[object, ...], JsonObject]:
        """Return the arguments of mca's chunk for those of ROLL.

        Raises:
            McaError: The inputs or positions are of another kind than the model's.
        """
        media = {name: kwargs[name] for name in _NAMES & kwargs.keys()}
        given = {name: value for name, value in kwargs.items() if name not in _NAMES | _DERIVED}
        tokens, theirs = given["input_ids"], given.pop("position_ids", None)
        spans = self._located(tokens.cpu(), theirs, given.pop("attention_mask", None), media)
        joined = self._join(spans, [tokens.shape[1]] * len(tokens), _cut, packed=False).to(tokens.device)
        images = joined.keywords(weights_dtype(chunk))
        ours = {"input_ids": _cut(tokens, 1), "attention_mask": None, "position_ids": joined.sections}
        return args, given | ours | images

    def _located(
        self, tokens: Tensor, theirs: Tensor | None, mask: Tensor | None, media: Mapping[str, Tensor]
    ) -> list[SampleImages | None]:
        """Return the media of each sequence, among the tokens of all."""
        if not media:
            if bool(torch.isin(tokens, self._tokens).any()):
                raise McaError(
                    "a micro-batch has placeholders of media, but no multi_modal_inputs; return them with the batch"
                )
            return [None] * len(tokens)
        batch = BatchMedia({name: value.cpu() for name, value in media.items()}, self._config, ROLL)
        sections = [None] * len(tokens) if theirs is None else list(theirs.cpu().unbind(1))
        located = [
            batch.take(ids, None if own is None else own[0])
            for ids, own in zip(tokens, sections, strict=True)
        ]
        batch.require_taken()
        for row, (own, images) in enumerate(zip(sections, located, strict=True)):
            if own is not None:
                real = torch.ones_like(tokens[row]) if mask is None else mask[row].cpu()
                _require_positions(own[:, real.bool()], images, real)
        return located


def _cut(tokens: Tensor, axis: int) -> Tensor:
    group = parallel.context_group()
    return take_rank_tokens(tokens, axis, group.rank(), group.size()).contiguous()


def _require_positions(theirs: Tensor, images: SampleImages | None, real: Tensor) -> None:
    """Raise unless ROLL's positions of the tokens that are no padding are mca's, up to a shift.

    Args:
        theirs: ``[3, tokens]``.
        images: Media of the sequence.
        real: 1 for each token that is no padding, else 0.
    """
    ours = torch.from_numpy(positions(len(real), images.places if images else ()))[:, real.bool()]
    shift = theirs - ours.to(theirs.dtype)
    if shift.numel() and not bool((shift == shift[0, 0]).all()):
        raise McaError(
            "a micro-batch has position_ids that mca does not have for this model and its images; train on text only"
        )
