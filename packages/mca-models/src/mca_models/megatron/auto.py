"""``AutoModel``: load a model from a checkpoint directory, or make one from a configuration.

This module only combines `factory` (building, filling) and `state` (saving).
"""

import logging
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mca_config.arguments import DistributingParallelArguments
from mca_config.checks import require_layout
from mca_config.errors import McaError, raising_usage_errors
from mca_config.model_config import DtypeName, McaModelConfig, training_dtype
from mca_config.printable import counted
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.hub import resolve_directory
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import run_on_first_rank_unwrapped
from mca_models.megatron.factory import fill
from mca_models.megatron.factory.transformer_config import DTYPES
from mca_models.megatron.factory.vocabulary import plan_growth, require_growth
from mca_models.megatron.names import Implementation, LocalParam
from mca_models.megatron.types import Upstream
from mca_models.megatron.virtual_models import VirtualModels
from mca_models.storage.source import ModelSource
from mca_models.templates import get_family
from mca_models.templates.classification_head import SCORE, Head, with_head
from mca_models.templates.parts.passthrough import passthrough_notice, with_mtp_count, without_passthrough
from mca_models.weights import Param

_log = logging.getLogger(__name__)


class AutoModel:
    """Factory of ``VirtualModels``. All methods are collective: every rank calls them with equal arguments.

    Under a launcher (torchrun, mca-train) it also starts the process groups, unless they exist already.
    """

    @staticmethod
    def from_pretrained(
        path: str | Path,
        args: DistributingParallelArguments | None = None,
        *,
        dtype: DtypeName | None = None,
        seed: int = 1234,
        vocab_size: int | None = None,
        head: Head | None = None,
    ) -> VirtualModels:
        """Load a Hugging Face, MCA or Megatron (torch_dist) checkpoint on any layout.

        Args:
            path: The checkpoint directory, or an id of the Hub (``org/name``, ``org/name@revision``).
            args: Layout and computation; sizes default to those of an MCA checkpoint, else 1.
            dtype: ``float32``, ``bfloat16`` or ``float16``; None: the dtype of ``args``, else the checkpoint's.
            seed: Seed of Megatron's random states (dropout) and of new vocabulary rows.
            vocab_size: Rows of the vocabulary, for a tokenizer with more tokens than the checkpoint: new rows are
                the mean of the old ones with a little noise, equal on every layout. None: the checkpoint's.
            head: Sequence- or token-classification head. If the checkpoint has a language-model head, the new head
                is drawn from ``seed`` as Hugging Face initialises it. None: the checkpoint's.

        Raises:
            McaError: The checkpoint is incomplete or, as a UsageError, the layout or ``head`` does not fit it.
        """
        args = args or DistributingParallelArguments()
        folder = resolve_directory(path)
        source: ModelSource = open_checkpoint(folder)
        config = source.config
        if vocab_size is not None and vocab_size != config.vocab_size:
            require_growth(config.vocab_size, vocab_size)
            config = replace(config, vocab_size=vocab_size)
        if head is not None:
            config = with_head(config, head)
        with raising_usage_errors():
            models = _build(config, args, dtype, seed, folder)
        models.new_params = _new_params(config, source.config)
        run_on_first_rank_unwrapped(source.check_duplicates)
        broadcast = bool(vars(args).get("load_broadcast"))  # training arguments only
        models.bytes_read = _fill(models, source, seed, broadcast=broadcast)
        _log.info(
            "loaded %s %s from %s as %s, %s layers",
            config.model_type,
            models.config.dtype,
            path,
            models.rank_context.layout,
            models.implementation.replace("_", " "),
        )
        return models

    @staticmethod
    def from_config(
        config: McaModelConfig,
        args: DistributingParallelArguments | None = None,
        *,
        dtype: DtypeName | None = None,
        seed: int = 1234,
    ) -> VirtualModels:
        """Return a randomly initialised model, the same on every layout for the same ``seed``."""
        models = AutoModel.unfilled(config, args, dtype=dtype, seed=seed)
        fill.from_seed(seed, models.local_params(), models.config, models.rank_context.coordinates)
        return models

    @staticmethod
    def unfilled(
        config: McaModelConfig,
        args: DistributingParallelArguments | None = None,
        *,
        dtype: DtypeName | None = None,
        seed: int = 1234,
    ) -> VirtualModels:
        """Build a model whose parameters are not filled, for callers that fill or only inspect them."""
        return _build(config, args or DistributingParallelArguments(), dtype, seed, None)


def _fill(models: VirtualModels, source: ModelSource, seed: int, *, broadcast: bool) -> int:
    """Read this rank's shards from ``source``, and draw those that it lacks; return the bytes read; collective."""
    layout, coordinates = models.rank_context.layout, models.rank_context.coordinates
    vocab_size, growth = models.config.vocab_size, None
    if vocab_size != source.config.vocab_size:
        growth = plan_growth(source, vocab_size, seed)
    lacking = {param.mca_name() for param in models.new_params if not param.vocab}
    drawn: list[tuple[LocalParam, Tensor]] = []
    stored: list[tuple[LocalParam, Tensor]] = []
    for pair in models.local_params():
        (drawn if pair[0].param.mca_name() in lacking else stored).append(pair)
    fill.from_seed(seed, drawn, models.config, coordinates)
    if rounded := fill.rounded_names(source, stored):
        _log.info(
            "rounding %s on this rank from fp32 to %s, in exports too: %s%s",
            counted(len(rounded), "tensor"),
            models.config.dtype,
            ", ".join(rounded[:2]),
            ", ..." if rounded[2:] else "",
        )
    return fill.from_source(source, stored, layout, coordinates, growth=growth, broadcast=broadcast)


def _new_params(config: McaModelConfig, stored: McaModelConfig) -> tuple[Param, ...]:
    """Return the parameters of ``config`` that a checkpoint of ``stored`` lacks, or has fewer rows of."""
    head = config.head.num_labels is not None and stored.head.num_labels is None
    grown = config.vocab_size != stored.vocab_size
    if not head and not grown:
        return ()
    return tuple(
        param
        for param in get_family(config.model_type).params(config)
        if not param.alias_of and ((head and param.hf[0].startswith(f"{SCORE}.")) or (grown and param.vocab))
    )


def _build(
    config: McaModelConfig,
    args: DistributingParallelArguments,
    dtype: DtypeName | None,
    seed: int,
    source: Path | None,
) -> VirtualModels:
    if not hasattr(args, "layout"):  # such as transformers.TrainingArguments
        given = f"{type(args).__module__.partition('.')[0]}.{type(args).__name__}"
        raise McaError(f"args is {given}; use mca_config.TrainingArguments")
    if notice := passthrough_notice(config):
        _log.warning("%s", notice)
    config = without_passthrough(config)
    if args.mtp_num_layers is not None and args.mtp_num_layers != config.mtp_num_layers:
        config = _with_mtp_layers(config, args.mtp_num_layers)
    layout = args.layout(config.layout)
    require_layout(config, layout)
    if dtype is not None and dtype not in DTYPES:
        raise McaError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    rank_context = parallel.start(
        layout, seed, embedding_ranks=_embedding_ranks(replace(config, layout=layout))
    )
    models = VirtualModels(
        config, args, rank_context, dtype=dtype or training_dtype(config, args), source=source
    )
    if warning := local_layers_warning(models.implementation, args.transformer_impl, _missing_engine()):
        _log.warning("%s", warning)
    if notice := token_distribution_notice(models.megatron):
        _log.info("%s", notice)
    return models


def token_distribution_notice(megatron: Upstream) -> str | None:
    """Return a notice for settings whose results depend on which rank computes a token; None: none does.

    Args:
        megatron: Megatron's configuration.
    """
    kinds = megatron.moe_router_load_balancing_type
    name = None
    if "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds):
        name = "moe_router_load_balancing_type sinkhorn"
    elif megatron.moe_expert_capacity_factor is not None:
        name = "moe_expert_capacity_factor"
    return name and (
        f"{name} distributes the tokens that a rank has of a micro-batch, so results depend on the layout, on the "
        "micro-batch and on padding; they are reproducible if these stay the same"
    )


def _missing_engine() -> str | None:
    """Return why Transformer Engine cannot run on this GPU; None on a CPU, or if it can."""
    return platform.engine_problem() if platform.device_type() == "cuda" else None


def local_layers_warning(built: Implementation, asked: str | None, missing: str | None) -> str | None:
    """Return a warning if a GPU runs Megatron's local layers although they were not asked for; else None.

    Args:
        built: The implementation that was built.
        asked: ``transformer_impl`` of the arguments.
        missing: Why Transformer Engine cannot run; None on a CPU.
    """
    if missing is None or built != "local" or asked == "local":
        return None
    return (
        f"{missing}, so Megatron's local layers run: slower, with more memory, without fp8; install mca-models[te], "
        "or set transformer_impl to local if that is what you want"
    )


def _embedding_ranks(config: McaModelConfig) -> tuple[int, ...]:
    """Return the pipeline ranks with the embedding: first, MTP, and with tied embeddings the last."""
    ranks = config.pipeline_plan().embedding_ranks
    return (*ranks, config.layout.pp - 1) if config.head.tie_word_embeddings else ranks


def _with_mtp_layers(config: McaModelConfig, count: int) -> McaModelConfig:
    if count > config.mtp_num_layers:
        raise McaError(
            f"mtp_num_layers {count} is more than the model's {counted(config.mtp_num_layers, 'MTP layer')}; "
            "lower it"
        )
    return config.replace_fields(mtp_num_layers=count, hf_config=with_mtp_count(config.hf_config, count))
