"""MTP layers on the last decoder layer's output before the final norm; the output layer takes the normed states.

Megatron passes the normed states to both.
"""

import torch
from torch import Tensor

from mca_models.megatron.features.feature import Feature
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


MTP_BEFORE_NORM = Feature(
    name="MTP before the final norm",
    enabled=lambda config: config.mtp.mtp_before_final_norm,
    finish=lambda model, config: predict_before_norm(model),
)
