"""Build the GPT model of one virtual pipeline stage, with its attention kernel and parameter attributes.

Its weights are filled in `fill`; process groups are made in `distributed.parallel`.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mca_config.checks import fp8_token_multiple
from mca_config.errors import McaError, raise_problems
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.megatron import features, platform
from mca_models.megatron.layers.spec import block_spec, mtp_spec
from mca_models.megatron.names import Implementation, LocalParam
from mca_models.megatron.types import GptModel, MarkedParameter, MegatronConfig, Upstream

DETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""Read by Transformer Engine's attention when it is built: whether gradients may differ from run to run."""
NAMES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@contextmanager
def kernel_choice(backend: str | None, *, engine: bool, deterministic: bool = False) -> Iterator[None]:
    """Set the variables while Megatron builds a model.

    Args:
        backend: The model's ``attention_backend``.
        engine: Whether the model has Transformer Engine's attention, which reads the variables in every forward pass:
            then they stay set. Else they are restored, so that the next model may choose another kernel.
        deterministic: The model's ``deterministic_mode``, which the engine's attention reads in the environment too.

    Raises:
        McaError: The variables contradict ``backend``, set by the user or for another model of this process.
    """
    before = {} if engine else {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    allowed = os.environ.get(DETERMINISM)
    if deterministic:
        os.environ[DETERMINISM] = "0"
    try:
        yield
    except AssertionError as error:
        name = next((name for name in NAMES if str(error).startswith(name)), None)
        if name is None:
            raise
        raise McaError(
            f"{name} is {os.environ[name]} in the environment, which contradicts attention_backend "
            f"{backend or 'auto'}; unset {', '.join(NAMES)}, or set attention_backend to the same choice (a process "
            "can have only one)"
        ) from error
    finally:
        if deterministic:
            os.environ.pop(DETERMINISM)
            os.environ.update({} if allowed is None else {DETERMINISM: allowed})
        if not engine:
            for name in NAMES:
                os.environ.pop(name, None)
            os.environ.update(before)


def build_chunk(
    config: McaModelConfig, megatron: MegatronConfig, chunk: PipelineChunk, implementation: Implementation
) -> torch.nn.Module:
    """Build Megatron's ``GPTModel`` for ``chunk``; its parameters are not filled.

    Args:
        config: The model, with the layout that is built.
        megatron: Its ``TransformerConfig``.
        chunk: Contents of the virtual stage.
        implementation: Layer implementation.
    """
    from megatron.core.models.gpt import GPTModel

    vp_stage = chunk.vp if config.layout.vpp > 1 else None
    backend = getattr(megatron.attention_backend, "name", None)
    engine = implementation == "transformer_engine" and backend != "local"
    choice = kernel_choice(backend, engine=engine, deterministic=bool(megatron.deterministic_mode))
    with choice, features.building(config, megatron, implementation):
        decoder = block_spec(megatron, implementation, vp_stage)
        prediction = mtp_spec(megatron, decoder, implementation, vp_stage)
        model: GptModel = GPTModel(
            config=megatron,
            transformer_layer_spec=features.adapted_block(decoder, config, implementation, chunk.layers),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.max_position_embeddings + config.embedding.position_offset,
            pre_process=chunk.has_embedding,
            post_process=chunk.has_loss,
            parallel_output=True,
            share_embeddings_and_output_weights=config.head.tie_word_embeddings,
            position_embedding_type=features.positions(config),
            rotary_percent=config.rope.rotary_percent,
            rotary_base=config.rope.rotary_base,
            mtp_block_spec=features.adapted_prediction(prediction, config, implementation),
            vp_stage=vp_stage,
        )
    _require_fp8_sizes(model, megatron)
    features.finish(model, config)
    module: torch.nn.Module = model.to(platform.current_device())
    return module


def _require_fp8_sizes(model: torch.nn.Module, megatron: MegatronConfig) -> None:
    """Raise if fp8 is on and a matrix of this rank has sizes that Transformer Engine's kernels do not support."""
    if not megatron.fp8:
        return
    multiple = fp8_token_multiple(megatron.fp8, megatron.fp8_recipe)
    problems = [
        f"{name} is {' x '.join(map(str, shape))} on each tensor rank, and fp8 needs multiples of {multiple}; change "
        "tensor_model_parallel_size or fp8_recipe, or remove fp8"
        for name, shape in _matrices(model, megatron)
        if any(size % multiple for size in shape)
    ]
    raise_problems(problems, "this model cannot be computed in fp8", shown=5)


def _matrices(model: torch.nn.Module, megatron: MegatronConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the matrices that Transformer Engine multiplies in fp8."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    plain: set[str] = set()
    modules: Iterator[tuple[str, Upstream]] = model.named_modules()
    for name, module in modules:
        parent = name.rpartition(".")[0]
        layer = getattr(module, "layer_number", 0) - 1 if parent.endswith("decoder.layers") else -1
        if parent in plain or is_first_last_bf16_layer(megatron, layer):
            plain.add(name)
        elif hasattr(module, "fp8_meta"):
            for of, tensor in module.named_parameters(recurse=False):
                if tensor.dim() == 2:
                    yield f"{name}.{of}", tuple(tensor.shape)


def live_tensors(model: torch.nn.Module, params: list[LocalParam]) -> dict[str, Tensor]:
    """Return the chunk's tensors by live name, after checking that they are exactly those of ``params``.

    Raises:
        McaError: A tensor has no rule, or a rule no tensor.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    expected = [item.live for item in params]
    tensors |= {name: buffers[name] for name in expected if name in buffers}
    problems = [f"no rule for the live tensor {name}" for name in sorted(tensors.keys() - set(expected))]
    problems += [f"no live tensor {name}" for name in expected if name not in tensors]
    raise_problems(problems, "the built model and its template differ", shown=20)
    return {name: tensors[name] for name in expected}


def set_parameter_attributes(params: Iterable[tuple[LocalParam, Tensor]], layout: ParallelLayout) -> int:
    """Set missing or wrong attributes of parameters that Megatron reads; return how many were set.

    The norm of all gradients counts a parameter once: a sharded one on every tensor rank, a replicated one on the
    first. Megatron sets these attributes while it initialises weights. Weights that are filled from a checkpoint
    instead (``perform_initialization`` off) lack them before megatron-core 0.18, and the norm, and with it clipping,
    silently misses all ranks but the first. Transformer Engine also marks the replicated down-projections of MLA as
    sharded, which would count once on every tensor rank. megatron-core 0.19 reverts that, but leaves ``partition_dim``,
    by which Muon gathers shards.

    Vocabulary rows have their own learning rate (``decoupled_lr``). The copy of the embedding for MTP layers on another
    pipeline rank is not marked in 0.16: its rows would diverge from those of the first rank.

    The gradients of experts are summed over the ranks with the same experts. Before 0.19 megatron-core marks them so
    (``allreduce`` false) with expert parallelism only, and sums over the dense parameters' replicas otherwise: wrong if
    the expert tensor size is not the tensor size.

    Args:
        params: Every parameter of this rank with its rule (``VirtualModels.local_params()``).
        layout: The parallel sizes.
    """
    separate = layout.ep > 1 or layout.etp != layout.tp
    marked = 0
    for item, tensor in params:
        param: MarkedParameter = tensor
        if item.param.vocab:
            param.is_embedding_or_output_parameter = True
        axis, expert = item.param.shard.axis, item.param.expert is not None
        cut = (axis is not None, -1 if axis is None else axis)
        if cut != (getattr(param, "tensor_model_parallel", False), getattr(param, "partition_dim", -1)):
            param.tensor_model_parallel, param.partition_dim = cut
            param.partition_stride = 1
            marked += 1
        if expert and getattr(param, "allreduce", True) == separate:
            param.allreduce = not separate
            marked += 1
    return marked
