"""MTP: layers on the last decoder layer's output before the final norm, a guard against a wrong loss, and media.

Megatron passes the normed states both to MTP layers and to the output layer.

An MTP layer takes the embedding of the next token, which for a placeholder is its feature. The towers are on the first
stage and MTP layers on the last. Therefore each stage sends the features of shifted placeholders after its hidden
states, along the sequence: a message has ``1 + mtp_num_layers`` times the tokens, and autograd returns the gradients
the same way.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import pipeline_plan
from mca_models.megatron import platform
from mca_models.megatron.features.feature import FIXED_IN_0_17, Feature, Setup
from mca_models.megatron.types import GptModel, MegatronModule, PackedSeqParams, Settings


def predict_before_norm(model: GptModel) -> None:
    """Replace the input of a chunk's MTP layers; `mca_config.checks` puts the final norm on the same chunk."""
    if not model.mtp_process:
        return
    states: list[Tensor] = []  # of the running forward pass: before the norm, then after it

    def keep(norm: MegatronModule, args: tuple[Tensor, ...]) -> None:
        states[:] = args[:1]

    def exchange(
        mtp: MegatronModule, args: tuple[object, ...], options: Settings
    ) -> tuple[tuple[object, ...], Settings]:
        states.append(options["hidden_states"])
        return args, {**options, "hidden_states": states[0]}

    def put_back(mtp: MegatronModule, args: tuple[object, ...], output: Tensor) -> Tensor:
        _, *predicted = output.chunk(1 + len(mtp.layers))
        return torch.cat([states[1], *predicted])

    model.decoder.final_layernorm.register_forward_pre_hook(keep)
    model.mtp.register_forward_pre_hook(exchange, with_kwargs=True)
    model.mtp.register_forward_hook(put_back)
    model.register_forward_hook(lambda *whole: states.clear())


def _guard_loss(model: GptModel, config: McaModelConfig) -> None:
    if model.post_process:
        model.register_forward_pre_hook(_reject_megatron_loss, with_kwargs=True)


def _reject_megatron_loss(model: GptModel, args: tuple[object, ...], options: dict[str, object]) -> None:
    """Reject Megatron's MTP loss with context parallelism; a hook before a chunk's forward pass.

    Megatron divides it by the context rank's token count: since 0.17 always, before that unless
    ``calculate_per_token_loss`` is on.
    """
    divided = platform.megatron_version() >= FIXED_IN_0_17 or not model.config.calculate_per_token_loss
    # mca_train sets the attribute where it computes the loss
    megatron_loss = model.config.mtp_num_layers and "mca_mtp_loss" not in vars(model)
    if divided and megatron_loss and torch.is_grad_enabled() and options.get("labels") is not None:
        raise McaError(
            "Megatron's MTP loss is wrong with context_parallel_size above 1; train with McaTrainer, which computes "
            "it, or set context_parallel_size to 1 or mtp_num_layers to 0"
        )


def mtp_media_problems(
    config: McaModelConfig, layout: ParallelLayout, *, bidirectional: bool
) -> Iterator[str]:
    """Yield reasons why MTP layers cannot be trained with media.

    Args:
        config: The model.
        layout: Its layout.
        bidirectional: The tokens of an image attend to each other in both directions.
    """
    if not config.mtp_num_layers:
        return
    if bidirectional:
        yield (
            "MTP layers cannot be trained with images that attend in both directions, because a prediction of the next "
            "token would see that token; set mtp_num_layers to 0"
        )
    plan = pipeline_plan(layout, config.num_layers, config.mtp_num_layers)
    if any(chunk.mtp_layers and not chunk.has_loss for chunk in plan):
        yield (
            "MTP layers on another pipeline stage than the loss cannot be trained with media; move m of "
            "pipeline_model_parallel_layout into the stage of L"
        )


def widened_length(length: int, mtp_layers: int | None, pipeline_size: int, *, has_media: bool) -> int:
    """Return the tokens of a message between pipeline stages.

    Args:
        length: Tokens of a row.
        mtp_layers: MTP layers that are trained.
        pipeline_size: Pipeline stages.
        has_media: Any micro-batch of the step has media.
    """
    return length * (1 + (mtp_layers or 0)) if has_media and pipeline_size > 1 else length


def shifted_rows(rows: Tensor, count: int, packed: PackedSeqParams | None) -> list[Tensor]:
    """Return the feature rows ``[b, s]`` of the next token, of the one after it, and so on; -1 past the end.

    Collective over the context-parallel ranks.
    """
    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    group, current, found = get_context_parallel_group(), rows + 1, list[Tensor]()  # shifting fills with 0
    for _ in range(count):
        current = roll_tensor(current, shifts=-1, dims=-1, cp_group=group, packed_seq_params=packed)[0]
        found.append(current - 1)
    return found


class SentFeatures:
    """Features ``[s, b, hidden]`` for each MTP layer that one chunk receives and sends with its hidden states."""

    def __init__(self) -> None:
        self._features: tuple[Tensor, ...] = ()

    @property
    def features(self) -> tuple[Tensor, ...]:
        """The features for each MTP layer; empty without."""
        return self._features

    def receive(self, model: GptModel, mtp_layers: int) -> None:
        """Take the features out of the input of a chunk after the first."""
        hidden, *features = model.decoder.input_tensor.chunk(1 + mtp_layers)
        model.decoder.set_input_tensor(hidden)
        self._features = tuple(features)

    def add(self, features: tuple[Tensor, ...]) -> None:
        """Set the features that the first chunk computed."""
        self._features = features

    def send(self, output: Tensor) -> Tensor:
        """Return the hidden states ``output`` of a chunk with the features after them."""
        features, self._features = self._features, ()
        return torch.cat([output, *(each.to(output.dtype) for each in features)]) if features else output

    def clear(self) -> None:
        """Forget the features of a micro-batch."""
        self._features = ()


def _problems(setup: Setup) -> Iterator[str]:
    config, layout = setup.config, setup.layout
    plan = pipeline_plan(layout, config.num_layers, config.mtp_num_layers)
    middle = range(1, layout.pp - 1)
    if layout.vpp > 1 and config.head.tie_word_embeddings and {*middle} & {*plan.embedding_ranks}:
        yield (
            "megatron-core cannot tie the embedding to MTP layers on a pipeline rank between the first and the last "
            "with virtual stages; move m of pipeline_model_parallel_layout into the stage of L"
        )


MTP = Feature(
    name="MTP",
    enabled=lambda config: config.mtp_num_layers > 0,
    settings=lambda config: {"mtp_num_layers": config.mtp_num_layers},
    problems=_problems,
)
MTP_LOSS = Feature(
    name="loss of MTP layers",
    enabled=lambda config: config.mtp_num_layers > 0 and config.layout.cp > 1,
    finish=_guard_loss,
)
MTP_BEFORE_NORM = Feature(
    name="MTP before the final norm",
    enabled=lambda config: config.mtp.mtp_before_final_norm,
    finish=lambda model, config: predict_before_norm(model),
)
