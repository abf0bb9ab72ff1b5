"""Build the GPT model of one virtual pipeline stage.

Its weights are filled in `fill`; process groups are made in `distributed.parallel`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mca_config.checks import fp8_token_multiple
from mca_config.errors import McaError, raise_problems
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.megatron import features, platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.factory.fused_limits import FIXED_IN_0_17
from mca_models.megatron.factory.kernel_choice import kernel_choice
from mca_models.megatron.layers.classification_head import ClassificationHead
from mca_models.megatron.layers.spec import block_spec, mtp_spec
from mca_models.megatron.names import Implementation, LocalParam
from mca_models.megatron.types import GptModel, MegatronConfig, Upstream, WithBias


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
    features.before_building(config, megatron)
    decoder = block_spec(megatron, implementation, vp_stage)
    prediction = mtp_spec(megatron, decoder, implementation, vp_stage)
    backend = getattr(megatron.attention_backend, "name", None)
    engine = implementation == "transformer_engine" and backend != "local"
    choice = kernel_choice(backend, engine=engine, deterministic=bool(megatron.deterministic_mode))
    with choice, features.latent_projections(config, implementation):
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
    rotary = features.rotary(config, parallel.context_group())
    if rotary is not None:
        model.rotary_pos_emb = rotary
    features.finish(model, config)
    if chunk.has_loss and config.head.num_labels is not None:
        model.output_layer = ClassificationHead(
            megatron, config.head.num_labels, bias=config.head.head_kind == "token_classification"
        )
    elif chunk.has_loss:
        _mask_padding(model.output_layer, config)
    if chunk.has_loss and config.mtp_num_layers and config.layout.cp > 1:
        model.register_forward_pre_hook(_reject_megatron_mtp_loss, with_kwargs=True)
    module: torch.nn.Module = model.to(platform.current_device())
    return module


def _mask_padding(output_layer: torch.nn.Module, config: McaModelConfig) -> None:
    """Set the logits of padded vocabulary rows to the lowest number, so that softmax and loss ignore them."""
    group = parallel.tensor_group()
    padded = config.padded_vocab_size
    if padded == config.vocab_size:
        return
    share = padded // group.size()

    def mask(module: torch.nn.Module, args: tuple[object, ...], output: WithBias) -> WithBias:
        logits, bias = output
        first = 0 if logits.shape[-1] == padded else group.rank() * share
        true = max(config.vocab_size - first, 0)
        if true >= logits.shape[-1]:
            return output
        columns = torch.arange(logits.shape[-1], device=logits.device) >= true
        return logits.masked_fill(columns, torch.finfo(logits.dtype).min), bias

    output_layer.register_forward_hook(mask)


def _reject_megatron_mtp_loss(model: GptModel, args: tuple[object, ...], options: dict[str, object]) -> None:
    """Reject Megatron's MTP loss with context parallelism; a hook before a chunk's forward pass.

    Megatron divides it by the context rank's token count: since 0.17 always, before that unless
    ``calculate_per_token_loss`` is on.
    """
    divided = platform.megatron_version() >= FIXED_IN_0_17 or not model.config.calculate_per_token_loss
    megatron_loss = model.config.mtp_num_layers and "mca_mtp_loss" not in vars(
        model
    )  # else mca_train computes it
    if divided and megatron_loss and torch.is_grad_enabled() and options.get("labels") is not None:
        raise McaError(
            "Megatron's MTP loss is wrong with context_parallel_size above 1; train with McaTrainer, which computes "
            "it, or set context_parallel_size to 1 or mtp_num_layers to 0"
        )


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
