"""MTP: layers on the last decoder layer's output before the final norm, and a guard against a wrong loss.

Megatron passes the normed states both to MTP layers and to the output layer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import pipeline_plan
from mca_models.megatron import platform
from mca_models.megatron.features.feature import FIXED_IN_0_17, Feature, Setup
from mca_models.megatron.types import GptModel, MegatronModule, Settings


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
