"""All virtual pipeline stages of a rank as one module.

It combines the chunks of `factory` with the functions of `state`, `forward` and `log_probs`.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from mca_models.megatron.factory.chunks import build_chunk, live_tensors, set_parameter_attributes
from mca_models.megatron.factory.transformer_config import choose_implementation, transformer_config
from mca_models.megatron.features.media import image_problems
from mca_models.megatron.forward import GivenMedia, model_logits
from mca_models.megatron.log_probs.forward import Batch, LogProbs, RoutedLogProbs, model_log_probs
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_models.megatron.names import Implementation, LocalParam, NamingScheme, chunk_params
from mca_models.megatron.state.export import (
    BUCKET_BYTES,
    Destination,
    WeightBucket,
    WeightRequest,
    each_tensor,
    export_buckets,
)
from mca_models.megatron.state.load import load_weights
from mca_models.megatron.state.save import save_hf, save_mca
from mca_models.megatron.state.sender import WeightSender
from mca_models.megatron.state.stream import Piece
from mca_models.megatron.state.torch_dist import PendingSave, save_torch_dist
from mca_models.megatron.state.weight_receiver import Weight
from mca_models.megatron.types import MegatronConfig
from mca_models.templates.parts.vision_language import PARTS, Part, model_part, model_parts
from mca_models.weights import Param

CheckpointFormat = Literal["mca", "torch_dist"]


class VirtualModels(torch.nn.Module):
    """One rank's part of a model: a Megatron ``GPTModel`` for each virtual pipeline stage.

    Made by ``AutoModel``. Every rank of the world has one and calls the methods marked collective.

    A rank has the layers of its pipeline stages and the experts of its expert rank. Shapes of its shards: vocabulary
    ``[padded_vocab / tp, hidden]``, column-parallel (qkv, gate and up) ``[out / tp, in]``, row-parallel (output
    projections of attention and MLP) ``[out, in / tp]``, experts the same with etp. Norms and routers are replicated.

    Calling a chunk with ``input_ids`` and ``position_ids`` ``[batch, seq / cp]`` gives logits
    ``[batch, seq / cp, padded_vocab / tp]`` on the last stage, else hidden states ``[seq / cp, batch, hidden]``, with
    sequence parallelism ``[seq / cp / tp, batch, hidden]``; context rank r holds parts r and 2 cp - 1 - r of 2 cp.

    Attributes:
        config: The model, with its layout.
        args: A copy of the arguments it was made with.
        rank_context: Layout, rank and coordinates of this process.
        megatron: Megatron's ``TransformerConfig``, shared by all chunks.
        chunks: The ``GPTModel`` of each virtual stage, in model order.
        implementation: ``local`` or ``transformer_engine`` layers.
        source: The checkpoint directory it was loaded from, None for a random one.
        bytes_read: Bytes that this rank read from that checkpoint.
        new_params: Parameters that it lacks, or has fewer rows of: a new head, a grown vocabulary.
    """

    def __init__(
        self,
        config: McaModelConfig,
        args: DistributingParallelArguments,
        rank_context: parallel.RankContext,
        *,
        dtype: DtypeName,
        source: Path | None = None,
    ) -> None:
        super().__init__()
        sequence_parallel = args.sequence_parallel_for(rank_context.layout)
        require_layout(
            config, rank_context.layout, rank_context.world_size, sequence_parallel=sequence_parallel
        )
        self.config = replace(config, layout=rank_context.layout, dtype=dtype)
        self.args = copy.copy(args)  # later changes do not change the model
        self.rank_context = rank_context
        self.source = source
        self.bytes_read = 0
        self.new_params: tuple[Param, ...] = ()
        self._adapters: list[AdapterConfig] = []  # of the chunks; shared by all models on these chunks
        self.implementation: Implementation = choose_implementation(args)
        self.megatron: MegatronConfig = transformer_config(self.config, args, rank_context.layout, dtype)
        self._parts = self.config.pipeline_plan().chunks[rank_context.coordinates.pp]
        self.chunks = torch.nn.ModuleList(
            build_chunk(self.config, self.megatron, part, self.implementation) for part in self._parts
        )
        self._local_params = [list(self._match(index)) for index in range(len(self.chunks))]
        set_parameter_attributes(self.local_params(), self.config.layout)
        self._bias_rate = self.megatron.moe_router_bias_update_rate

    @property
    def has_adapter(self) -> bool:
        """Return whether its chunks have an adapter, e.g. of a ``PeftModels`` that was made from it."""
        return bool(self._adapters)

    def reject_hidden_adapter(self) -> None:
        """Raise if a ``PeftModels`` was made from this model: it would compute with an unknown adapter.

        Raises:
            McaError: It has an adapter.
        """
        if self.has_adapter:
            raise McaError(
                "this model has an adapter; use the return value of get_peft_model or load_adapter, whose "
                "disable_adapter() gives the base model, or call merge_and_unload on it"
            )

    def _match(self, index: int) -> Iterator[tuple[LocalParam, Tensor]]:
        params = chunk_params(
            self.config,
            self._parts[index],
            self.rank_context.layout,
            self.rank_context.coordinates,
            self._naming(),
        )
        tensors = live_tensors(self.chunks[index], params)
        for item in params:
            yield item, tensors[item.live]

    def _naming(self) -> NamingScheme:
        grouped = self.implementation == "transformer_engine" and self.megatron.moe_grouped_gemm
        return NamingScheme(self.implementation, grouped, _mtp_layer_name())

    def local_params(self) -> Sequence[tuple[LocalParam, Tensor]]:
        """Return every parameter and saved buffer (shards) of this rank with its rule, second copies included."""
        return [pair for chunk in self._local_params for pair in chunk]

    def live_names(self) -> list[dict[str, Param]]:
        """Return each chunk's names of parameters and saved buffers with their rules, second copies included."""
        return [{item.live: item.param for item, _ in chunk} for chunk in self._local_params]

    def canonical_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield checkpoint names and live tensors (this rank's shards), without second copies of tied weights."""
        for item, tensor in self.local_params():
            if not item.copy:
                yield item.param.mca_name(), tensor

    def trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return checkpoint names and live tensors of this rank's shards that are trained."""
        return ((name, tensor) for name, tensor in self.canonical_parameters() if tensor.requires_grad)

    def train_parts(self, parts: Collection[Part]) -> None:
        """Select the parts of the model to train, before it is wrapped; the default is the language model.

        Raises:
            McaError: It has no such part, an adapter, or cannot take images on its layout.
        """
        self.reject_hidden_adapter()
        if unknown := sorted({*parts} - {*PARTS}):
            raise McaError(f"{', '.join(unknown)}: no part of a model; parts are {', '.join(PARTS)}")
        if {*parts} - {"language"}:
            self.require_images()
        if absent := sorted({*parts} - {*(found := model_parts(self.config))}):
            raise McaError(
                f"{', '.join(absent)}: a {self.config.model_type} model has no such part; it has {', '.join(found)}"
            )
        for item, tensor in self.local_params():
            if isinstance(tensor, torch.nn.Parameter):
                tensor.requires_grad_(model_part(item.param, self.config) in parts)
        # expert biases are no parameters, but belong to routers, which may be frozen
        self.megatron.moe_router_bias_update_rate = self._bias_rate if "language" in parts else 0.0

    def require_images(self) -> None:
        """Raise, with all reasons, if the model, its layout or its settings do not support images.

        Raises:
            McaError: Images are not supported.
        """
        problems = image_problems(self.config, self.rank_context.layout, self.megatron)
        raise_problems(problems, f"images for {self.config.model_type} at {self.rank_context.layout}")

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self.chunks)

    def logits(self, input_ids: Tensor, *, media: GivenMedia | None = None) -> Tensor:
        """Return the model's logits; collective, for checks and small models.

        Runs Megatron's forward schedule, so that pipeline and virtual stages communicate as in training.

        Args:
            input_ids: ``[batch, seq]``, the same on every rank.
            media: Images, videos and audio clips of each row, as in ``log_probs``.

        Returns:
            fp32 ``[batch, seq, vocab]`` without padding rows, the same on every rank.
        """
        self.reject_hidden_adapter()
        require_same_arguments("logits", **{"the shape of input_ids": list(input_ids.shape)})
        return model_logits(self, input_ids, media)

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
        routed_experts: Tensor | None = None,
        return_routed_experts: bool = False,
        media: GivenMedia | None = None,
    ) -> LogProbs | RoutedLogProbs | None:
        """Return each token's log-probability given the tokens before it, without gradients; collective.

        The ranks of a data-parallel replica get the same batch; replicas may have different ones. The logits of
        ``chunk_size`` tokens exist at a time: ``chunk_size x padded_vocab / tp`` numbers in the weights' dtype and
        once more in fp32, twice with the entropy. With gradients use ``McaTrainer.token_values`` in ``compute_loss``.

        Args:
            input_ids: ``[batch, seq]``; with ``cu_seqlens`` ``[1, tokens]``.
            mask: ``[batch, seq]``, False (0) for padding, which may be on either side; None: no padding.
            cu_seqlens: ``[sequences + 1]``, boundaries of packed sequences in the one row; given on all ranks or none.
            packed: Pack the sequences of a micro-batch into one row, without padding between them; equal on all ranks.
            temperature: Divisor of the logits.
            entropy: Also the entropy of the distribution that each token was drawn from.
            micro_batch_size: Sequences of a micro-batch.
            chunk_size: Number of tokens whose logits exist at a time.
            to: ``all`` ranks, or the first of each data-parallel replica; None is returned on the others.
            routed_experts: Experts that an engine chose, integers ``[batch, seq, layers, topk]``, for the layers with
                experts or for all decoder layers; -1 for tokens whose experts the routers choose. The routers weigh
                them by their own scores.
            return_routed_experts: Also return the experts of each token.
            media: For each sequence the outputs of the checkpoint's processor for its images, videos and audio clips
                (``pixel_values``, ``image_grid_thw``, ...), or an object with ``places`` and ``tensors``, such as the
                images of a sample; None: it has none. ``input_ids`` have one placeholder for each feature, as the
                processor writes them.

        Returns:
            ``log_probs`` and ``entropy`` (or None), fp32 of the shape of ``input_ids``; 0 for the first token of each
            sequence and for padding. With ``return_routed_experts`` also ``routed_experts``, int16
            ``[batch, seq, layers with experts, topk]``; -1 for padding.
        """
        self.reject_hidden_adapter()
        if self.config.head.num_labels is not None:
            raise McaError(
                f"the model has a head for {self.config.head.head_kind}, not a vocabulary: it has no log_probs"
                "; load a language model"
            )
        packed = packed or cu_seqlens is not None
        require_same_arguments(
            "log_probs",
            packed=packed,
            temperature=temperature,
            entropy=entropy,
            micro_batch_size=micro_batch_size,
            chunk_size=chunk_size,
            to=to,
            return_routed_experts=return_routed_experts,
        )
        if to not in ("all", "replicas"):
            raise McaError(f"to={to!r} is none of all, replicas")
        values = model_log_probs(
            self,
            lambda: Batch(
                *(input_ids, mask, cu_seqlens, packed, micro_batch_size, chunk_size),
                routed_experts,
                return_routed_experts,
                media,
            ),
            TokenValues(temperature=temperature, entropy=entropy),
        )
        coordinates = self.rank_context.coordinates
        return values if to == "all" or coordinates.tp == coordinates.cp == coordinates.pp == 0 else None

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        overwrite: bool = False,
        ckpt_format: CheckpointFormat = "mca",
        async_save: bool = False,
    ) -> PendingSave | None:
        """Write a checkpoint that ``AutoModel.from_pretrained`` loads on any layout; collective.

        Args:
            directory: Path of the checkpoint, which is complete or absent.
            overwrite: Replace an existing directory.
            ckpt_format: ``mca``, mca's format; or ``torch_dist``, which Megatron-LM reads too.
            async_save: Return once the weights are copied, and write them in the background (``torch_dist`` only);
                ``finish()`` of the returned save completes ``directory``.

        Returns:
            With ``async_save`` the running save, on every rank; else None.

        Raises:
            McaError: A rank could not write: all ranks raise, naming it, and ``directory`` is unchanged.
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
        self.reject_hidden_adapter()  # Megatron saves all that the chunks have
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
        per_expert: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and tensors, as `save_pretrained_as_hf` writes them; collective.

        All ranks must iterate to the end, also those that receive no tensors. The order is always the same. The
        consumer owns the tensors, which are views of a bucket. The next bucket is gathered while one is used, so do
        not change the weights meanwhile. A receiving rank needs the memory of two buckets and of the largest
        parameter.

        Args:
            to: Which ranks get the tensors: ``all``, the ``first``, or ``replicas``: the first of each data-parallel
                replica.
            bucket_bytes: Limit of a bucket; a larger tensor has its own bucket.
            dtype: Cast weights to ``float32``, ``bfloat16`` or ``float16``; None: not cast.
            fp8: Weights of linears as e4m3 with a scale for each block of 128 x 128, ``..._scale_inv``. Families that
                `mca-convert --fp8` does not support are not supported here either.
            merged: Only for a model with an adapter: export the full model with the adapter merged in; the live weights
                are unchanged. Else its tensors are the adapter's, under PEFT's names.
            per_expert: Only for a model with an adapter: yield PEFT's matrices for all experts of a layer as factors of
                each expert's linears (``...experts.7.up_proj.lora_A.weight``), which inference engines load for most
                models with experts; their configuration is ``peft_config(per_expert=True)``.

        Raises:
            McaError: The arguments differ between ranks, or a rank failed, died, or stopped before the end; all raise.
        """
        return each_tensor(
            self.export_buckets(
                to=to, bucket_bytes=bucket_bytes, dtype=dtype, fp8=fp8, merged=merged, per_expert=per_expert
            )
        )

    def export_buckets(
        self,
        *,
        to: Destination = "all",
        bucket_bytes: int = BUCKET_BYTES,
        dtype: DtypeName | None = None,
        fp8: bool = False,
        split_experts: bool = False,
        merged: bool = False,
        per_expert: bool = False,
    ) -> Iterator[WeightBucket]:
        """Yield whole buckets of `export_weights`, for transports of one buffer; collective.

        The arguments are those of `export_weights`, and ``split_experts``: it sends tensors that hold all experts of a
        layer as slices within ``bucket_bytes``, so that none is gathered in full: entries with ``start``, which
        ``bucket.tensors()`` yields as ``(name, tensor, start)`` and `load_weights` takes.
        """
        request = WeightRequest(
            to=to,
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            fp8=fp8,
            split_experts=split_experts,
            merged=merged,
            per_expert=per_expert,
        )
        request.require_valid()
        return self._requested_buckets(request)

    def _requested_buckets(self, request: WeightRequest) -> Iterator[WeightBucket]:
        self._reject_adapter_options(request)
        return export_buckets(self, request)

    def weight_sender(
        self,
        *,
        to: Destination = "all",
        bucket_bytes: int = BUCKET_BYTES,
        dtype: DtypeName | None = None,
        fp8: bool = False,
        split_experts: bool = False,
        merged: bool = False,
        checksums: bool = False,
    ) -> WeightSender:
        """Return a sender whose ``buckets()`` yield all weights once and later only what changed; collective.

        The arguments are those of `export_buckets`, and ``checksums``: it records a CRC-32 of each tensor in the
        sender's manifest, for which its bytes pass through the CPU. A weight that is equal after the cast to ``dtype``
        has not changed. With ``split_experts`` each expert counts by itself.
        """
        request = WeightRequest(
            to=to, bucket_bytes=bucket_bytes, dtype=dtype, fp8=fp8, split_experts=split_experts, merged=merged
        )
        request.require_valid("weight_sender")
        return WeightSender(self, request, self._sender_piece(request), checksums=checksums)

    def _sender_piece(self, request: WeightRequest) -> Callable[[], Piece] | None:
        """Return what makes the shards of a `weight_sender`; None: the live ones."""
        self._reject_adapter_options(request)
        return None

    def _reject_adapter_options(self, request: WeightRequest) -> None:
        for name, value in (("merged", request.merged), ("per_expert", request.per_expert)):
            if value:
                self.reject_hidden_adapter()
                raise McaError(f"{name}=True: this model has no adapter; remove {name}")

    def load_weights(self, weights: Iterable[Weight]) -> None:
        """Load all weights from Hugging Face tensors, as `export_weights` yields them, in any order; collective.

        Every rank gets all tensors and keeps its shards at once. A tensor may also come in pieces:
        ``(name, rows, first row)``. Tied tensors may come once or under both names. After an error the model has some
        of the new weights. Afterwards refresh a trainer's optimizer: ``trainer.engine.reload_main_params()``.

        Args:
            weights: Names and tensors, in fp64, fp32, bf16 or fp16, or in fp8 with scales, on any device.

        Raises:
            McaError: Names are missing or unexpected, a shape or dtype is wrong, or a rank failed; all ranks raise.
        """
        load_weights(self, weights)

    def save_pretrained_as_hf(
        self, directory: str | Path, *, overwrite: bool = False, max_shard_bytes: int | None = None
    ) -> None:
        """Write a Hugging Face checkpoint; collective. A rank needs the memory of a few parameters.

        Args:
            directory: Path of the checkpoint, which is complete or absent.
            overwrite: Replace an existing directory.
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
    """Return Megatron's name for the decoder layer inside an MTP layer, which changed with 0.17."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

    return next(
        name
        for name in ("mtp_model_layer", "transformer_layer")
        if name in MultiTokenPredictionLayerSubmodules.__annotations__
    )
