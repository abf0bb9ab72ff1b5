"""``PeftModels``: ``VirtualModels`` with a LoRA adapter under PEFT's names on the HF model.

`create` makes it. `attach` and `linear` put factors on linears, `mca_models.lora` writes directories, and
distributed checkpoints contain the factors.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.layout import Coordinates
from mca_config.types import JsonObject
from mca_models.lora import Adapter, AdapterConfig, AdapterRules, adapter_for, write_mca_adapter, write_peft
from mca_models.lora.peft_directory import per_expert_config, require_per_expert
from mca_models.lora.rules import PREFIX
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import require_same_arguments, run_on_first_rank_unwrapped
from mca_models.megatron.distributed.parallel import RankContext
from mca_models.megatron.factory.fill import full_shape, shard_rank_and_size
from mca_models.megatron.peft.attach import (
    CHILD,
    Attached,
    LinearGroups,
    attach,
    begin_gradients,
    detach,
    warn_unused_dropout,
)
from mca_models.megatron.peft.exchange import merged_piece, peft_tensors, receive_adapter, whole_adapter
from mca_models.megatron.state.export import WeightBucket, WeightRequest, export_buckets, packed_buckets
from mca_models.megatron.state.load import load_local_weights
from mca_models.megatron.state.save import save_hf, save_mca
from mca_models.megatron.state.stream import Piece
from mca_models.megatron.state.weight_receiver import Weight, load_on_all_ranks
from mca_models.megatron.tensors import cast_finite, to_torch
from mca_models.megatron.types import DcpObject, GptModel, ShardedState
from mca_models.megatron.virtual_models import CheckpointFormat, VirtualModels
from mca_models.templates.parts.vision_language import Part
from mca_models.weights import Param
from mca_models.weights.arrays import Array, split_ratio

_METHOD = "sharded_state_dict"
Replica = tuple[int, int, int]


def patch_sharded_state(chunk: GptModel, by_tensor: Mapping[int, Param], rank_context: RankContext) -> None:
    """Replace ``sharded_state_dict`` of this one ``chunk``.

    Args:
        chunk: A live ``GPTModel`` with adapters.
        by_tensor: The rules of all factors by ``id`` of their live tensors.
        rank_context: This rank and the layout.
    """
    original = chunk.sharded_state_dict

    def sharded_state_dict(*args: object, **kwargs: object) -> ShardedState:
        prefix = kwargs.get("prefix", args[0] if args else "")
        state = {name: x for name, x in original(*args, **kwargs).items() if f".{CHILD}." not in name}
        for name, tensor in chunk.named_parameters():
            if param := by_tensor.get(id(tensor)):
                state[f"{prefix}{name}"] = _sharded(param, tensor, rank_context)
        return state

    setattr(chunk, _METHOD, sharded_state_dict)


def restore_sharded_state(chunk: torch.nn.Module) -> None:
    """Restore the class's ``sharded_state_dict`` of ``chunk``."""
    vars(chunk).pop(_METHOD, None)


def _sharded(param: Param, tensor: Tensor, rank_context: RankContext) -> DcpObject:
    name, replica = param.mca_name(), _replica(param, rank_context.coordinates, rank_context.layout.cp)
    cut = shard_rank_and_size(param, rank_context.layout, rank_context.coordinates)
    if len(param.shard.segments) == 1:
        return _piece(name, tensor, param, cut, replica)
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def segments(key: str, piece: Tensor, replica_id: Replica, _: object) -> list[DcpObject]:
        rows = split_ratio(piece, 0, param.shard.segments)
        return [_piece(f"{key}.{i}", each, param, cut, replica_id) for i, each in enumerate(rows)]

    return ShardedTensorFactory(name, tensor, segments, torch.cat, replica)


def _piece(name: str, tensor: Tensor, param: Param, cut: tuple[int, int], replica_id: Replica) -> DcpObject:
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor.from_rank_offsets(
        name,
        tensor,
        *([] if param.shard.axis is None else [(param.shard.axis, *cut)]),
        replica_id=replica_id,
        allow_shape_mismatch=param.vocab,
    )


def _replica(param: Param, coordinates: Coordinates, cp: int) -> Replica:
    """Return Megatron's replica id of this rank's shard: over pipeline, tensor and data ranks."""
    cut = param.shard.axis is not None
    if param.expert is not None:
        return 0, 0 if cut else coordinates.etp, coordinates.edp
    return 0, 0 if cut else coordinates.tp, coordinates.dp * cp + coordinates.cp


Read = Callable[[Param, tuple[int, ...]], Array]


class PeftModels(VirtualModels):
    """A model with a LoRA adapter; everything but the adapter is frozen.

    Made by ``get_peft_model`` or ``load_adapter`` from ``VirtualModels``, whose chunks it shares. It has all methods of
    ``VirtualModels``; the two ``save`` methods write the adapter only, as PEFT's do, and ``export_weights`` yields it
    under PEFT's names unless ``merged`` is set.

    Attributes:
        adapter: The adapter's configuration.
        rules: Rules of its tensors on all ranks.
    """

    def __init__(self, base: VirtualModels, adapter: AdapterConfig, rules: AdapterRules) -> None:
        torch.nn.Module.__init__(self)
        vars(self).update(vars(base), _base=base)  # the same chunks, not copies
        self.adapter, self.rules = adapter, rules
        self._before = [(parameter, parameter.requires_grad) for parameter in base.parameters()]
        self._rate_before = self.megatron.moe_router_bias_update_rate
        self._originals: list[Tensor] | None = None  # of the merged weights, of which a rank may have none
        self._attached = self._attach()
        self._adapters.append(adapter)
        self._factors = [pair for item in self._attached for pair in item.live]
        self._saved, self._copies = (list(self._saved_whole(copies=copies)) for copies in (False, True))
        self.requires_grad_(False)
        for param, tensor in self._every():
            tensor.requires_grad_(is_trained(param, adapter, rules))
        self._handles = [handle for chunk in self.chunks for handle in begin_gradients(chunk)]
        self._share_state_dicts()
        # the routers are frozen, so their balancing biases are too
        self.megatron.moe_router_bias_update_rate = 0.0

    def _attach(self) -> list[Attached]:
        ranks = LinearGroups(
            parallel.tensor_group(),
            parallel.expert_tensor_group(),
            sequence_parallel=bool(self.megatron.sequence_parallel),
            overlap=bool(self.megatron.moe_shared_expert_overlap),
            fuser=bool(vars(self.megatron).get("use_transformer_engine_op_fuser")),  # since 0.17
        )
        grouped = self._naming().grouped_experts
        attached: list[Attached] = []
        dropout = self.adapter.dropout
        warn_unused_dropout(self.rules, dropout)
        try:
            for chunk, params in zip(self.chunks, self._local_params, strict=True):
                for item in attach(chunk, params, self.rules, ranks, dropout=dropout, grouped=grouped):
                    attached.append(item)
        except BaseException:
            detach(attached)
            raise
        return attached

    def reject_hidden_adapter(self) -> None:
        """Do nothing: this model knows its adapter."""

    def train_parts(self, parts: Collection[Part]) -> None:
        """Raise: the adapter alone is trained."""
        raise McaError(
            "train_parts: this model has an adapter, which alone is trained; call get_peft_model(..., parts=...) to "
            "adapt other parts"
        )

    def _saved_whole(self, *, copies: bool) -> Iterator[tuple[Param, Tensor]]:
        saved = {param.mca_name(): param for param in self.rules.full_params}
        for item, tensor in self.local_params():
            if item.copy is copies and item.param.mca_name() in saved:
                yield saved[item.param.mca_name()], tensor

    def _live(self) -> list[tuple[Param, Tensor]]:
        return [*self._factors, *self._saved]

    def _every(self) -> list[tuple[Param, Tensor]]:
        """Return also second copies: MTP layers on another stage have one of the embedding."""
        return [*self._live(), *self._copies]

    def _share_state_dicts(self) -> None:
        """Replace the factors in Megatron's distributed checkpoints by their canonical names."""
        by_tensor = {id(tensor): param for param, tensor in self._factors}
        for chunk in self.chunks:
            patch_sharded_state(chunk, by_tensor, self.rank_context)

    def load_pretrained(self, directory: str | Path) -> None:
        """Load the adapter, not merged, from a PEFT or MCA directory of the same targets, ranks and scales."""
        if self.merged:
            raise McaError("the adapter is merged; call unmerge_adapter before load_pretrained")
        adapter = adapter_for(Path(directory), self.config)
        require_same(adapter.rules, self.rules, directory)
        self.fill(lambda param, shape: adapter.read(param), saved=True)

    def fill(self, read: Read, *, saved: bool) -> None:
        """Fill this rank's shards of the adapter; none of them if one cannot be read.

        Args:
            read: Returns the full tensor of a rule as a NumPy array, from the rule and its shape.
            saved: Fill also the parameters of ``modules_to_save``; else they keep the base model's values.
        """
        config, coordinates = self.config, self.rank_context.coordinates
        values: list[tuple[Tensor, Tensor]] = []
        for param, tensor in self._every() if saved else self._factors:
            whole = full_shape(param, tensor, config)
            source = Adapter(config, self.adapter, self.rules, _with_shape(read, whole))
            rank, size = shard_rank_and_size(param, config.layout, coordinates)
            values.append((tensor, _cast_like(tensor, source.piece(param, rank, size), param.mca_name())))
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield canonical names and live tensors of this rank's shards of the adapter."""
        for param, tensor in self._live():
            yield param.mca_name(), tensor

    def trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same, and second copies of parameters saved with the adapter."""
        for param, tensor in self._every():
            yield param.mca_name(), tensor

    def print_trainable_parameters(self) -> str:
        """Return a text with the number of trained parameters on this rank."""
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        every = sum(p.numel() for p in self.parameters())
        return f"{trained:,} of {every:,} parameters of this rank are trained ({trained / every:.2%})"

    @property
    def merged(self) -> bool:
        """Return whether the adapter is merged into the weights."""
        return self._originals is not None

    @torch.no_grad()
    def merge_adapter(self) -> None:
        """Merge the adapter into the weights (fp32, then their dtype); keep the originals in host memory."""
        if self.merged:
            raise McaError("the adapter is merged already; call unmerge_adapter first")
        if any(item.switch.merged for item in self._attached):
            raise McaError("the adapter is disabled; merge it after the block of disable_adapter")
        self._originals = [item.base.detach().cpu().clone() for item in self._attached]
        try:
            for item in self._attached:
                item.base.copy_(item.folded())
                item.switch.merged = True
        except BaseException:
            self.unmerge_adapter()
            raise

    @torch.no_grad()
    def unmerge_adapter(self) -> None:
        """Restore the original weights bit by bit."""
        if self._originals is None:
            raise McaError("the adapter is not merged; call merge_adapter first")
        for item, original in zip(self._attached, self._originals, strict=True):
            item.base.copy_(original)
            item.switch.merged = False
        self._originals = None

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Compute as the base model does, in this block; not supported with ``modules_to_save``."""
        require_base_weights(self.adapter, merged=self.merged)
        before = [item.switch.merged for item in self._attached]
        try:
            for item in self._attached:
                item.switch.merged = True
            yield
        finally:
            for item, merged in zip(self._attached, before, strict=True):
                item.switch.merged = merged

    def merge_and_unload(self) -> VirtualModels:
        """Return the base model with the adapter merged in, trained as before; do not use this object again."""
        if not self.merged:
            self.merge_adapter()
        self.detach()
        base: VirtualModels = vars(self)["_base"]
        vars(base).update({name: vars(self)[name] for name in vars(base)})
        return base

    def detach(self) -> None:
        """Remove the adapter from the chunks, whose weights stay as they are; do not use this object again."""
        detach(self._attached)
        self._adapters.clear()
        for chunk in self.chunks:
            restore_sharded_state(chunk)
        for handle in self._handles:
            handle.remove()
        for parameter, trained in self._before:
            parameter.requires_grad_(trained)
        self.megatron.moe_router_bias_update_rate = self._rate_before

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        overwrite: bool = False,
        ckpt_format: CheckpointFormat = "mca",
        async_save: bool = False,
    ) -> None:
        """Write an MCA adapter directory of this layout; collective. Adapters have no other format."""
        require_same_arguments(
            "save_pretrained",
            directory=str(directory),
            overwrite=overwrite,
            ckpt_format=ckpt_format,
            async_save=async_save,
        )
        if ckpt_format != "mca" or async_save:
            raise McaError(
                "an adapter is always written with ckpt_format mca and without async_save; remove both settings"
            )
        self._write(
            lambda adapter: write_mca_adapter(
                adapter, self.config.layout, Path(directory), overwrite=overwrite
            )
        )

    def save_pretrained_as_hf(
        self, directory: str | Path, *, overwrite: bool = False, max_shard_bytes: int | None = None
    ) -> None:
        """Write a PEFT adapter directory, which ``peft`` loads onto the HF model; collective."""
        require_same_arguments("save_pretrained_as_hf", directory=str(directory), overwrite=overwrite)
        self._write(lambda adapter: write_peft(adapter, Path(directory), overwrite=overwrite))

    def save_merged_as_hf(
        self, directory: str | Path, *, overwrite: bool = False, max_shard_bytes: int | None = None
    ) -> None:
        """Write the HF model with the adapter merged in; collective."""
        require_same_arguments(
            "save_merged_as_hf",
            directory=str(directory),
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
        )
        piece = self._merged_piece()
        save_hf(self, Path(directory), overwrite=overwrite, max_shard_bytes=max_shard_bytes, piece=piece)

    def save_merged(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write an MCA checkpoint of the model with the adapter merged in; collective."""
        require_same_arguments("save_merged", directory=str(directory), overwrite=overwrite)
        save_mca(self, Path(directory), overwrite=overwrite, piece=self._merged_piece())

    def load_weights(self, weights: Iterable[Weight]) -> None:
        """Load the adapter, from tensors under PEFT's names, or else the base model; collective.

        The first name decides; all tensors must be of the same kind. Formats as for ``VirtualModels.load_weights``. The
        adapter must not be merged.
        """
        if self.merged:
            raise McaError("the adapter is merged; call unmerge_adapter before load_weights")
        stream = iter(weights)
        first: list[Weight] = []
        load_on_all_ranks(lambda: first.extend(islice(stream, 1)))
        adapts = bool(first) and first[0][0].startswith(PREFIX)
        kind = "those of an adapter" if adapts else "those of the base model" if first else "none"
        require_same_arguments("load_weights", weights=kind)
        take = self._take if adapts else partial(load_local_weights, self)
        load_on_all_ranks(lambda: take(chain(first, stream)))

    def _take(self, every: Iterable[Weight]) -> None:
        read = receive_adapter(Adapter(self.config, self.adapter, self.rules, lambda param: None), every)
        self.fill(lambda param, shape: read(param), saved=True)

    def _requested_buckets(self, request: WeightRequest) -> Iterator[WeightBucket]:
        """Return the adapter's buckets, as `save_pretrained_as_hf` writes it, or those of the merged model."""
        if request.merged and request.per_expert:
            raise McaError(
                "per_expert is a layout of the adapter, which merged=True merges; remove one of them"
            )
        if request.merged:
            return export_buckets(self, request, self._merged_piece())
        for name in ("fp8", "split_experts"):
            if getattr(request, name):
                raise McaError(f"{name} is not supported for an adapter; remove {name}, or set merged")
        return self._adapter_buckets(request)

    def _sender_piece(self, request: WeightRequest) -> Callable[[], Piece]:
        if not request.merged:
            raise McaError(
                "weight_sender sends full models; set merged=True, or send the adapter with export_weights"
            )
        return self._merged_piece

    def peft_config(self, *, per_expert: bool = False) -> JsonObject:
        """Return the contents of ``adapter_config.json``.

        Args:
            per_expert: For the tensors of ``export_weights(per_expert=True)``.
        """
        document = dict(self.adapter.document)
        return per_expert_config(document, self.rules, self.config) if per_expert else document

    def _merged_piece(self) -> Piece:
        live = dict(self.canonical_parameters())
        return live.get if self.merged else merged_piece(live, self._attached)

    def _adapter_buckets(self, request: WeightRequest) -> Iterator[WeightBucket]:
        """Yield buckets of the adapter, which each receiving rank gathers in full."""
        if request.per_expert:
            require_per_expert(self.rules, self.config)
        targets = request.targets(self.rank_context)
        adapter = whole_adapter(
            self._live(), self.rank_context, self.config, self.adapter, self.rules, everywhere=targets != {0}
        )
        if adapter is not None and self.rank_context.rank in targets:
            tensors = peft_tensors(adapter, request.dtype, per_expert=request.per_expert)
            yield from packed_buckets(tensors, request.bucket_bytes)

    def _write(self, write: Callable[[Adapter], None]) -> None:
        adapter = whole_adapter(self._live(), self.rank_context, self.config, self.adapter, self.rules)
        run_on_first_rank_unwrapped(lambda: write(adapter) if adapter else None)


def _with_shape(read: Read, shape: tuple[int, ...]) -> Callable[[Param], Array]:
    return lambda param: read(param, shape)


def _cast_like(tensor: Tensor, piece: Array, name: str) -> Tensor:
    """Cast ``piece`` to the dtype of ``tensor``, which has its shape."""
    import numpy as np

    value = to_torch(np.array(piece))
    if value.shape != tensor.shape:
        raise McaError(f"a piece of the adapter has shape {list(value.shape)}, here {list(tensor.shape)}")
    return cast_finite(value, tensor.dtype, name)


def require_same(theirs: AdapterRules, mine: AdapterRules, directory: str | Path) -> None:
    """Raise unless the adapter of ``directory`` was trained with the tensors, ranks and scales of the live one.

    Raises:
        McaError: It has other tensors, or some of another rank or scale.
    """
    there, here = ({param.mca_name() for param in rules.params} for rules in (theirs, mine))
    if there != here:
        raise McaError(
            f"{directory}: its adapter has other tensors than this model's ({min(there ^ here)}, ...); load it "
            "with load_adapter onto the base model"
        )
    saved = _scales(theirs)
    for name, (module, rank, scale) in _scales(mine).items():
        if saved[name] != (module, rank, scale):
            _, its_rank, its_scale = saved[name]
            raise McaError(
                f"{directory}: its adapter on {module} has rank {its_rank} and scale {its_scale:g}, this model's "
                f"{rank} and {scale:g}; set lora_rank, lora_alpha and use_rslora (rank_pattern, alpha_pattern) to "
                "those that it was trained with"
            )


def _scales(rules: AdapterRules) -> Mapping[str, tuple[str, int, float]]:
    return {pair.a.mca_name(): (pair.target.module, pair.rank, pair.scale) for pair in rules.factors}


def require_base_weights(adapter: AdapterConfig, *, merged: bool) -> None:
    """Raise if disabling the adapter would not give the base model.

    Raises:
        McaError: It is merged, or trains the base model's own parameters.
    """
    if merged:
        raise McaError("the adapter is merged; call unmerge_adapter first")
    if adapter.modules_to_save:
        raise McaError(
            "disable_adapter is not supported with modules_to_save, which trains parts of the base model; load the "
            "base model a second time as reference, or remove modules_to_save"
        )


def is_trained(param: Param, adapter: AdapterConfig, rules: AdapterRules) -> bool:
    """Return whether PEFT trains ``param``: not one that it only saved, and with MiCA only lora_A."""
    if ".lora_B." in param.mca:
        return str(adapter.document.get("init_lora_weights")).lower() != "mica"
    return all(param is not other for other in rules.kept)
