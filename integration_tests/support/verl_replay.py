"""Checks of router replay by verl's engine mca (R2, R3) on CPU ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass

from mca_config.errors import McaError
from mca_train.clients.verl.engine import McaEngine

LENGTHS = (24, 9, 17, 12)
"""Tokens of the sequences; micro-batches have two of them."""


def replay(job: dict[str, Any]) -> None:
    """Compare the engine's log-probabilities with those of mca's model that is given the same experts."""
    {"R2": _replay_own_experts, "R3": _replay_rollout}[job["mode"]](_engine(job), _batch())


def _engine(job: dict[str, Any]) -> McaEngine:
    """Return an engine of ``job["model"]`` with router replay; in R2 it trains."""
    off: dict[str, Any] = dict.fromkeys(("lora_rank", "lora_adapter_path", "use_fused_kernels", "use_liger"))
    off |= dict.fromkeys(
        ("enable_gradient_checkpointing", "enable_activation_offload", "tokenizer", "target_parameters")
    )
    off |= {
        "path": job["model"],
        "hf_config_path": None,
        "hf_config": SimpleNamespace(),
        "lora": {},
        "mtp": SimpleNamespace(enable=False),
        "tiled_mlp": {},
        "override_config": {},
        "get_processor": lambda: None,
    }
    trains = job["mode"] == "R2"
    own: dict[str, Any] = {"dtype": "float32", "use_remove_padding": job["packed"]}
    with initialize_config_module("mca_train.clients.verl.config", version_base=None):
        composed = compose(
            "engine/mca",
            overrides=[f"engine.router_replay.mode={job['mode']}", f"engine.forward_only={not trains}"],
        )
    config = replace(omega_conf_to_dataclass(composed.engine), **own, **job["sizes"])
    optimizer, checkpoint = None, None
    if trains:
        with initialize_config_module("verl.trainer.config", version_base=None):
            parts = compose(
                "sft_trainer_engine", overrides=["optim=megatron", "optim.total_training_steps=4"]
            )
        optimizer, checkpoint = (omega_conf_to_dataclass(parts[name]) for name in ("optim", "checkpoint"))
    engine = McaEngine(SimpleNamespace(local_path=job["model"], **off), config, optimizer, checkpoint)
    engine.initialize()
    return engine


def _batch() -> TensorDict:
    """Return sequences with experts of 4 layers, 2 of 4, as verl's rollout returns them."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (length,), generator=generator) for length in LENGTHS]
    draws = [torch.rand(length, 4, 4, generator=generator).argsort(-1)[..., :2] for length in LENGTHS]
    experts = [each.to(torch.int16) for each in draws]
    for each in experts:
        each[-1] = 0
    experts[1][5:] = 0  # no choice
    data = TensorDict(
        {
            "input_ids": _nested(rows),
            "loss_mask": _nested([torch.ones(length) for length in LENGTHS]),
            "routed_experts": _nested(experts),
        },
        batch_size=len(LENGTHS),
    )
    tensordict_utils.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, temperature=1.0
    )
    return data


def _nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _expected(engine: McaEngine, ids: Tensor, experts: Tensor | None) -> Tensor:
    """Return the log-probabilities of ``ids[1:]``; `VirtualModels.log_probs` has other tests."""
    given = None if experts is None else experts[None]
    found: Tensor = engine.models.log_probs(ids[None], routed_experts=given).log_probs[0, 1:]
    return found


def _compare(engine: McaEngine, data: TensorDict, experts: list[Tensor]) -> None:
    """Check the engine's log-probabilities of ``data``, and that they differ from those of the routers' choice."""
    found = engine.forward_backward_batch(data, None, forward_only=True)
    for row, (ids, given) in enumerate(zip(data["input_ids"].unbind(), experts, strict=True)):
        expected = _expected(engine, ids, given)
        if found:
            ours = found["model_output"]["log_probs"].unbind()[row][:-1]
            assert torch.allclose(ours, expected, atol=1e-5, rtol=0), (ours - expected).abs().max()
        live = _expected(engine, ids, None)
        assert (live - expected).abs().max() > 1e-3, "other experts give other values"


def _error(engine: McaEngine, data: TensorDict, *, forward_only: bool) -> str:
    try:
        engine.forward_backward_batch(data, None, forward_only=forward_only)
    except McaError as error:
        return str(error)
    raise AssertionError("a batch without experts was accepted")


def _replay_rollout(engine: McaEngine, data: TensorDict) -> None:
    given = [each.clone() for each in data["routed_experts"].unbind()]
    for each in given:
        each[-1] = -1
    given[1][5:] = -1
    _compare(engine, data, given)
    error = _error(engine, data.exclude("routed_experts"), forward_only=True)
    assert "rollout.enable_rollout_routing_replay" in error, error


def _mean_loss(model_output: dict[str, Tensor], **_: Any) -> tuple[Tensor, dict[str, Any]]:
    return -model_output["log_probs"].values().mean(), {}


def _replay_own_experts(engine: McaEngine, data: TensorDict) -> None:
    data = data.exclude("routed_experts")
    error = _error(engine, data, forward_only=False)
    assert "compute the actor's log-probabilities first" in error, error
    live = engine.forward_backward_batch(data, _mean_loss, forward_only=True)
    chosen = [
        engine.models.log_probs(ids[None], return_routed_experts=True).routed_experts[0]
        for ids in data["input_ids"].unbind()
    ]
    again = data.clone()
    again["routed_experts"] = _nested(chosen)
    replayed = engine.forward_backward_batch(again, _mean_loss)
    if live:
        recorded = live["model_output"]["routed_experts"].unbind()
        assert all(torch.equal(*pair) for pair in zip(recorded, chosen, strict=True))
        assert replayed["loss"] == live["loss"], "the own choice changes no bit"
        assert "routed_experts" not in replayed["model_output"]
    with torch.no_grad():
        for name, parameter in engine.models.named_parameters():
            if name.endswith("router.weight"):
                parameter.copy_(parameter.roll(1, 0))  # each expert gets the tokens of another
    _compare(engine, again, chosen)
    if found := engine.forward_backward_batch(again, _mean_loss):
        assert found["loss"] != live["loss"], "the gates follow the changed routers"
