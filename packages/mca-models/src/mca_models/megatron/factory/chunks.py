"""Builds the GPT model of one virtual pipeline stage.

Its weights are not filled here (`fill`), and no process group is made.
"""

import torch
from torch import Tensor

from mca_config.errors import McaError, raise_problems
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.megatron import families, platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.factory.fp8_sizes import require_sizes
from mca_models.megatron.factory.fused_limits import FIXED_IN_0_17
from mca_models.megatron.factory.kernel_choice import kernel_choice
from mca_models.megatron.layers.score import Score
from mca_models.megatron.layers.spec import block_spec, mtp_spec
from mca_models.megatron.names import Held, Implementation
from mca_models.megatron.types import GptModel, MegatronConfig, WithBias


def build_chunk(
    config: McaModelConfig, megatron: MegatronConfig, chunk: PipelineChunk, implementation: Implementation
) -> torch.nn.Module:
    """Megatron's ``GPTModel`` for ``chunk``, its parameters not yet filled.

    Args:
        config: The model, with the layout that is built.
        megatron: Its ``TransformerConfig``.
        chunk: What the virtual stage holds.
        implementation: Whose layers.
    """
    from megatron.core.models.gpt import GPTModel

    vp_stage = chunk.vp if config.layout.vpp > 1 else None
    families.before_building(config, megatron)
    decoder = block_spec(megatron, implementation, vp_stage)
    prediction = mtp_spec(megatron, decoder, implementation, vp_stage)
    backend = getattr(megatron.attention_backend, "name", None)
    engine = implementation == "transformer_engine" and backend != "local"
    choice = kernel_choice(backend, engine=engine, deterministic=bool(megatron.deterministic_mode))
    with choice, families.latent_projections(config, implementation):
        model: GptModel = GPTModel(
            config=megatron,
            transformer_layer_spec=families.adapted_block(decoder, config, implementation, chunk.layers),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.max_position_embeddings + config.position_offset,
            pre_process=chunk.has_embedding,
            post_process=chunk.has_loss,
            parallel_output=True,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            position_embedding_type=families.positions(config),
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            mtp_block_spec=families.adapted_prediction(prediction, config, implementation),
            vp_stage=vp_stage,
        )
    require_sizes(model, megatron)
    rotary = families.rotary(config, parallel.context_group())
    if rotary is not None:
        model.rotary_pos_emb = rotary
    families.finish(model, config)
    if chunk.has_loss and config.num_labels is not None:
        model.output_layer = Score(megatron, config.num_labels, bias=config.head == "token_classification")
    elif chunk.has_loss:
        _mask_padding(model.output_layer, config)
    if chunk.has_loss and config.mtp_num_layers and config.layout.cp > 1:
        model.register_forward_pre_hook(_refuse_own_prediction, with_kwargs=True)
    module: torch.nn.Module = model.to(platform.current_device())
    return module


def _mask_padding(output_layer: torch.nn.Module, config: McaModelConfig) -> None:
    """Sets the logits of padded vocabulary rows to the least number, so that softmax and loss ignore them."""
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


def _refuse_own_prediction(model: GptModel, args: tuple[object, ...], options: dict[str, object]) -> None:
    """Before a chunk's forward on several context ranks: Megatron's own loss of prediction layers is not trained.

    It is divided by each context rank's own tokens: since megatron-core 0.17 always, before that unless
    ``calculate_per_token_loss`` is on.
    """
    divided = platform.megatron_version() >= FIXED_IN_0_17 or not model.config.calculate_per_token_loss
    own = model.config.mtp_num_layers and "mca_mtp_loss" not in vars(model)  # mca_train computes it
    if divided and own and torch.is_grad_enabled() and options.get("labels") is not None:
        raise McaError(
            "Megatron's own loss of prediction layers is wrong on several context ranks; train with McaTrainer, which "
            "computes it, or set context_parallel_size to 1 or mtp_num_layers to 0"
        )


def live_tensors(model: torch.nn.Module, held: list[Held]) -> dict[str, Tensor]:
    """The chunk's tensors by live name, found to be exactly those that ``held`` names.

    Raises:
        McaError: A tensor has no rule, or a rule no tensor.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    expected = [item.live for item in held]
    tensors |= {name: buffers[name] for name in expected if name in buffers}
    problems = [f"no rule for the live tensor {name}" for name in sorted(tensors.keys() - set(expected))]
    problems += [f"no live tensor {name}" for name in expected if name not in tensors]
    raise_problems(problems, "the built model and its template differ", shown=20)
    return {name: tensors[name] for name in expected}
