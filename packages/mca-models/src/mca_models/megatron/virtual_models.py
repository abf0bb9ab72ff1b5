"""All virtual pipeline stages of a rank as one module.

It holds what the factory made and hands its methods on; it computes nothing itself.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from mca_config.arguments import DistributingParallelArguments
from mca_config.checks import require_layout
from mca_config.errors import McaError, raise_problems
from mca_config.model_config import DtypeName, McaModelConfig
from mca_models.lora import AdapterConfig
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import require_same_arguments
from mca_models.megatron.factory.chunks import build_chunk, live_tensors
from mca_models.megatron.factory.transformer_config import implementation_of, transformer_config
from mca_models.megatron.families.image_limits import image_problems
from mca_models.megatron.families.vision_model import Part, part_of
from mca_models.megatron.forward import model_logits
from mca_models.megatron.layers.tp_marks import mark_parameters
from mca_models.megatron.log_probs.forward import Batch, LogProbs, model_log_probs
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_models.megatron.names import Held, Implementation, NamingScheme, chunk_params
from mca_models.megatron.state.arrivals import Weight
from mca_models.megatron.state.export import (
    BUCKET_BYTES,
    Destination,
    WeightBucket,
    agreed,
    each_tensor,
    export_buckets,
)
from mca_models.megatron.state.load import load_weights
from mca_models.megatron.state.save import save_hf, save_mca
from mca_models.megatron.state.torch_dist import PendingSave, save_torch_dist
from mca_models.megatron.types import MegatronConfig
from mca_models.weights import Param

CheckpointFormat = Literal["mca", "torch_dist"]


class VirtualModels(torch.nn.Module):
    """One rank's part of a model: a Megatron ``GPTModel`` for each virtual pipeline stage.

    Made by ``AutoModel``. Every rank of the world holds one; the methods marked collective are called by all.

    Weights of a rank, of the layers in its pipeline stages and the experts of its expert rank: vocabulary
    ``[padded_vocab / tp, hidden]``, column-parallel (qkv, gate and up) ``[out / tp, in]``, row-parallel (what attention
    and the MLP end with) ``[out, in / tp]``, experts the same with etp, norms and routers whole.

    Calling a chunk with ``input_ids`` and ``position_ids`` ``[batch, seq / cp]`` gives logits
    ``[batch, seq / cp, padded_vocab / tp]`` on the last stage, else hidden states ``[seq / cp, batch, hidden]``, with
    sequence parallelism ``[seq / cp / tp, batch, hidden]``; context rank r holds parts r and 2 cp - 1 - r of 2 cp.

    Attributes:
        config: The model, with the layout it stands on.
        args: The arguments it was made with.
        place: Where this rank stands in the layout.
        megatron: Megatron's ``TransformerConfig``, shared by all chunks.
        chunks: The ``GPTModel`` of each virtual stage, in model order.
        implementation: ``local`` or ``transformer_engine`` layers.
        source: The checkpoint directory it was loaded from, None for a random one.
        bytes_read: What this rank took out of that checkpoint.
        drawn: The parameters that it lacks, or has fewer rows of: a new head, a vocabulary that has grown.
    """

    def __init__(
        self,
        config: McaModelConfig,
        args: DistributingParallelArguments,
        place: parallel.Place,
        *,
        dtype: DtypeName,
        source: Path | None = None,
    ) -> None:
        super().__init__()
        sequence_parallel = args.sequence_parallel_for(place.layout)
        require_layout(config, place.layout, place.world_size, sequence_parallel=sequence_parallel)
        self.config = replace(config, layout=place.layout, dtype=dtype)
        self.args = args
        self.place = place
        self.source = source
        self.bytes_read = 0
        self.drawn: tuple[Param, ...] = ()
        self._adapters: list[AdapterConfig] = []  # on the chunks: one list of all who share these
        self.implementation: Implementation = implementation_of(args)
        self.megatron: MegatronConfig = transformer_config(self.config, args, place.layout, dtype)
        self._parts = self.config.pipeline_plan().chunks[place.at.pp]
        self.chunks = torch.nn.ModuleList(
            build_chunk(self.config, self.megatron, part, self.implementation) for part in self._parts
        )
        self._held = [list(self._match(index)) for index in range(len(self.chunks))]
        mark_parameters(self.held(), self.config.layout)
        self._bias_rate = self.megatron.moe_router_bias_update_rate

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter lies on its chunks, be it that of a ``PeftModels`` which was made of it."""
        return bool(self._adapters)

    def require_own(self) -> None:
        """Refuses a model of which a ``PeftModels`` was made: it computes with that adapter, but does not know it.

        Raises:
            McaError: It is one.
        """
        if self.has_adapter:
            raise McaError(
                "an adapter was put on this model; use what get_peft_model or load_adapter returned, whose "
                "disable_adapter() gives the base model, or call merge_and_unload on it"
            )

    def _match(self, index: int) -> Iterator[tuple[Held, Tensor]]:
        held = chunk_params(self.config, self._parts[index], self.place.layout, self.place.at, self._naming())
        tensors = live_tensors(self.chunks[index], held)
        for item in held:
            yield item, tensors[item.live]

    def _naming(self) -> NamingScheme:
        grouped = self.implementation == "transformer_engine" and self.megatron.moe_grouped_gemm
        return NamingScheme(self.implementation, grouped, _mtp_layer_name())

    def held(self) -> Sequence[tuple[Held, Tensor]]:
        """Every parameter (and saved buffer) of this rank with its rule, second copies included: this rank's pieces."""
        return [pair for chunk in self._held for pair in chunk]

    def canonical_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and live tensors (this rank's pieces), without second copies of tied weights."""
        for item, tensor in self.held():
            if not item.copy:
                yield item.param.mca_name(), tensor

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and live tensors of this rank's pieces of what training changes."""
        return ((name, tensor) for name, tensor in self.canonical_parameters() if tensor.requires_grad)

    def train_parts(self, parts: Collection[Part]) -> None:
        """Selects the parts of the model that train, before it is wrapped; by default all but vision and projector.

        Raises:
            McaError: It has no vision model, or cannot take images on its layout.
        """
        if unknown := sorted({*parts} - {*get_args(Part)}):
            raise McaError(f"{', '.join(unknown)}: no part of a model; parts are {', '.join(get_args(Part))}")
        if {"vision", "projector"} & {*parts}:
            self.require_images()
        for item, tensor in self.held():
            if isinstance(tensor, torch.nn.Parameter):
                tensor.requires_grad_(part_of(item.param, self.config) in parts)
        # biases that balance experts are no parameters, but belong to routers, which may be frozen
        self.megatron.moe_router_bias_update_rate = self._bias_rate if "language" in parts else 0.0

    def require_images(self) -> None:
        """Refuses images where the model, its layout or its settings cannot take them, all reasons at once.

        Raises:
            McaError: Some stand against it.
        """
        problems = image_problems(self.config, self.place.layout, self.megatron)
        raise_problems(problems, f"images for {self.config.model_type} at {self.place.layout}")

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self.chunks)

    def logits(self, input_ids: Tensor) -> Tensor:
        """The model's logits; collective, for checks and small models.

        Runs Megatron's own forward schedule, so pipeline and virtual stages communicate as in training.

        Args:
            input_ids: ``[batch, seq]``, the same on every rank.

        Returns:
            fp32 ``[batch, seq, vocab]`` without padding rows, the same on every rank.
        """
        self.require_own()
        require_same_arguments("logits", **{"the shape of input_ids": list(input_ids.shape)})
        return model_logits(self, input_ids)

    def log_probs(
        self,
        input_ids: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        packed: bool = False,
        temperature: float = 1.0,
        entropy: bool = False,
        micro_batch_size: int = 1,
        chunk_size: int = 1024,
        to: Literal["all", "replicas"] = "all",
    ) -> LogProbs | None:
        """Log-probability of each token after those before it, without gradients; collective.

        The ranks of a data-parallel replica are given the same batch; replicas may have others. Logits stand for
        ``chunk_size`` tokens at a time: ``chunk_size x padded_vocab / tp`` numbers in the weights' type and once more
        in fp32, twice with the entropy. Under ``compute_loss``, with gradients: ``McaTrainer.token_values``.

        Args:
            input_ids: ``[batch, seq]``; with ``cu_seqlens`` ``[1, tokens]``.
            mask: ``[batch, seq]``, False (0) for padding, which may be on either side; None: no padding.
            cu_seqlens: ``[sequences + 1]``, where packed sequences begin in the one row, and its end.
            packed: Compute the sequences of a micro-batch one after the other, without padding between them.
            temperature: What logits are divided by.
            entropy: Also the entropy of the distribution that each token was drawn from.
            micro_batch_size: Sequences of a micro-batch.
            chunk_size: Tokens whose logits exist at a time.
            to: ``all`` ranks, or the first of each data-parallel replica; None is returned on the others.

        Returns:
            ``log_probs`` and ``entropy`` (or None), fp32 of the shape of ``input_ids``; 0 for the first token of each
            sequence and for padding.
        """
        self.require_own()
        if self.config.num_labels is not None:
            raise McaError(
                f"the model has a head for {self.config.head}, not a vocabulary: it has no log_probs"
            )
        require_same_arguments(
            "log_probs",
            temperature=temperature,
            entropy=entropy,
            micro_batch_size=micro_batch_size,
            chunk_size=chunk_size,
            to=to,
        )
        if to not in ("all", "replicas"):
            raise McaError(f"to={to!r} is none of all, replicas")
        packed = packed or cu_seqlens is not None
        found = model_log_probs(
            self,
            lambda: Batch(input_ids, mask, cu_seqlens, packed, micro_batch_size, chunk_size),
            TokenValues(temperature=temperature, entropy=entropy),
        )
        at = self.place.at
        return found if to == "all" or at.tp == at.cp == at.pp == 0 else None

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        overwrite: bool = False,
        ckpt_format: CheckpointFormat = "mca",
        async_save: bool = False,
    ) -> PendingSave | None:
        """Writes a checkpoint that ``AutoModel.from_pretrained`` loads on any layout; collective.

        Args:
            directory: Where it will stand, complete or absent.
            overwrite: Replaces what stands there.
            ckpt_format: ``mca``, this project's own; or ``torch_dist``, which Megatron-LM reads too.
            async_save: Return as soon as the weights are copied and write them in the background (``torch_dist``
                only); the checkpoint stands at ``directory`` when ``finish()`` of what is returned has returned.

        Returns:
            With ``async_save`` the save that is under way, on every rank; else None.

        Raises:
            McaError: A rank could not write: all ranks raise, naming it, and ``directory`` is as before.
        """
        require_same_arguments(
            "save_pretrained",
            directory=str(directory),
            overwrite=overwrite,
            ckpt_format=ckpt_format,
            async_save=async_save,
        )
        if ckpt_format not in get_args(CheckpointFormat):
            raise McaError(f"ckpt_format {ckpt_format!r} is none of {', '.join(get_args(CheckpointFormat))}")
        if ckpt_format == "mca":
            if async_save:
                raise McaError("async_save writes torch_dist checkpoints only; add ckpt_format='torch_dist'")
            save_mca(self, Path(directory), overwrite=overwrite)
            return None
        pending = save_torch_dist(self, Path(directory), overwrite=overwrite, in_background=async_save)
        if async_save:
            return pending
        pending.finish()
        return None

    def export_weights(
        self,
        *,
        to: Destination = "all",
        bucket_bytes: int = BUCKET_BYTES,
        dtype: DtypeName | None = None,
        fp8: bool = False,
        merged: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors, as `save_pretrained_as_hf` writes them, one after the other; collective.

        All ranks must take them to the end, also those that get none. The order is always the same, and the tensors
        are the consumer's. They are views of a bucket, which lives as long as one of them. The next bucket is gathered
        while one is used, so do not change the weights meanwhile. A rank that gets the tensors needs the room of two
        buckets and the largest parameter.

        Args:
            to: Which ranks get the tensors: ``all``, the ``first``, or ``replicas``: the first of each data-parallel
                replica.
            bucket_bytes: Limit of a bucket; a tensor that is larger is one of its own.
            dtype: Cast weights to ``float32``, ``bfloat16`` or ``float16``; None: as they are.
            fp8: Weights of linears as e4m3 with a scale for each block of 128 x 128, ``..._scale_inv``. Families that
                `mca-convert --fp8` does not write are refused here too.
            merged: Only for a model with an adapter.

        Raises:
            McaError: The arguments differ between ranks, or a rank failed, died, or stopped before the end; all raise.
        """
        buckets = self.export_buckets(to=to, bucket_bytes=bucket_bytes, dtype=dtype, fp8=fp8, merged=merged)
        return each_tensor(buckets)

    def export_buckets(
        self,
        *,
        to: Destination = "all",
        bucket_bytes: int = BUCKET_BYTES,
        dtype: DtypeName | None = None,
        fp8: bool = False,
        merged: bool = False,
    ) -> Iterator[WeightBucket]:
        """`export_weights` in whole buckets, for transports that want one buffer; collective."""
        wanted = agreed(to=to, bucket_bytes=bucket_bytes, dtype=dtype, fp8=fp8, merged=merged)
        if merged:
            self.require_own()
            raise McaError("merged=True: this model has no adapter to merge; leave merged out")
        return export_buckets(self, wanted)

    def load_weights(self, weights: Iterable[Weight]) -> None:
        """Sets all weights to Hugging Face tensors, as `export_weights` yields them, in any order; collective.

        Every rank is given all tensors and keeps what it needs of each at once. A tensor may also come in pieces:
        ``(name, rows, first row)``. Tied tensors may come once or under both names. After an error the model has some
        of the new weights. Then refresh a trainer's optimizer: ``trainer.engine.reload_main_params()``.

        Args:
            weights: Names and tensors, in fp64, fp32, bf16 or fp16, or in fp8 with scales, on any device.

        Raises:
            McaError: Names are missing or too many, a shape or dtype is wrong, or a rank failed; all ranks raise.
        """
        load_weights(self, weights)

    def save_pretrained_as_hf(
        self, directory: str | Path, *, overwrite: bool = False, max_shard_bytes: int | None = None
    ) -> None:
        """Writes a Hugging Face checkpoint; collective. A rank needs the room of a few parameters (docs/limits.md).

        Args:
            directory: Where it will stand, complete or absent.
            overwrite: Replaces what stands there.
            max_shard_bytes: Limit of one file's tensors; None: 5 GB.
        """
        require_same_arguments(
            "save_pretrained_as_hf",
            directory=str(directory),
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
        )
        save_hf(self, Path(directory), overwrite=overwrite, max_shard_bytes=max_shard_bytes)


def _mtp_layer_name() -> str:
    """Megatron's name for the decoder layer inside a prediction layer, which changed with 0.17."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

    return next(
        name
        for name in ("mtp_model_layer", "transformer_layer")
        if name in MultiTokenPredictionLayerSubmodules.__annotations__
    )
