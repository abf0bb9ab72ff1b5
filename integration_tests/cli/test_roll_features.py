"""Router replay, LoRA and images of ROLL's own Megatron strategies on mca, compared with transformers step by step.

    MCA_ROLL=CHECKOUT .venv-roll/bin/python -m pytest -n 0 -m qualify --cases all \
        integration_tests/cli/test_roll_features.py
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import torch
import transformers

from forced_routing import forced_experts, other_experts
from harness import run_ranks
from mca_models import AutoConfig
from mca_models.media import positions
from mca_models.megatron.features.router_replay import RoutedExperts
from roll_runs import CHECKOUT, LENGTH, ROWS, batch_of, reference_losses, train_steps, train_strategy
from vision_reference import logits_of, rows_of, vision_model

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.qualify,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(CHECKOUT is None, reason="needs MCA_ROLL, a checkout of ROLL"),
]

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
CP, VPP, SP = "context_parallel_size", "virtual_pipeline_model_parallel_size", "sequence_parallel"


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that saves a tiny model with a tokenizer; ROLL writes its logs to the same folder."""
    from tokenizers_for_tests import byte_tokenizer

    def save(case: str, **size: int) -> Path:
        path = tiny_hf.save(case, tmp_path / "model", **size)
        if "moe" in case:
            model = transformers.AutoModelForCausalLM.from_pretrained(path)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.mul_(8 if ".experts." in name else 1)  # so that the choice of experts matters
            model.save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
        return path

    monkeypatch.chdir(tmp_path)
    return save


def losses_of_roll(path: Path, out: Path, options: dict[str, Any], batches: Any) -> list[float] | None:
    """Return the loss of each step of ROLL's training strategy; None where the last stage is elsewhere."""
    strategy = train_strategy(path, out, options)
    losses = train_steps(strategy, range(3), batches=batches)
    return losses if strategy.worker.rank_info.is_pipeline_last_stage else None


def routed_batch(shape: RoutedExperts, layers: int, step: int) -> dict[str, Any]:
    """Return a batch with the experts that an engine chose: rows for all layers, zeros for padding."""
    batch = batch_of(step)
    chosen = other_experts(shape, ROWS, LENGTH, seed=step)
    experts = torch.zeros(ROWS, LENGTH, layers, shape.topk, dtype=torch.long)
    experts[:, :, list(shape.layers)] = chosen
    experts *= batch["attention_mask"][:, :, None, None]
    return batch | {"routed_experts": experts.int()}


def forced_logits(shape: RoutedExperts, model: Any, micro: dict[str, Any]) -> torch.Tensor:
    experts = micro["routed_experts"][:, :, list(shape.layers)]
    padding = micro["attention_mask"] == 0
    experts[padding] = torch.arange(shape.topk, dtype=experts.dtype)  # no loss depends on padding
    with forced_experts(model, experts, shape):
        logits: torch.Tensor = model(
            input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]
        ).logits
    return logits


REPLAYED = {
    "ep2": ("qwen3_moe", {EP: 2}),
    "tp2_recompute": ("qwen3_moe", {TP: 2, SP: True, "recompute_granularity": "full"}),
    "pp2_vpp2": ("qwen3_moe", {PP: 2, VPP: 2}),
    "dense_first_pp2": ("glm4_moe", {PP: 2}),
    "cp2": ("qwen3_moe", {CP: 2}),
    "tp2_cp2": ("qwen3_moe", {TP: 2, SP: True, CP: 2}),
}


@pytest.mark.parametrize("layout", REPLAYED)
def test_replayed_experts_give_the_losses_of_a_forced_transformers_model(layout, checkpoint, tmp_path):
    case, options = REPLAYED[layout]
    path = checkpoint(case, **({"num_hidden_layers": 4} if VPP in options else {}))
    config = AutoConfig.from_pretrained(path)
    shape = RoutedExperts.from_config(config)
    assert shape is not None
    batches = partial(routed_batch, shape, config.num_layers)
    options = options | {"replay": "R3", "moe_aux_loss_coeff": 0.0}
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    wanted = reference_losses(model, batches=batches, logits_of=partial(forced_logits, shape))
    free = reference_losses(transformers.AutoModelForCausalLM.from_pretrained(path), batches=batches)
    assert all(abs(a - b) > 1e-3 for a, b in zip(free, wanted, strict=True)), "the experts change nothing"
    ranks = 4 if layout == "tp2_cp2" else 2
    found = run_ranks(ranks, losses_of_roll, path, tmp_path / "out", options, batches, timeout=900)
    assert any(found)
    for losses in filter(None, found):
        assert losses == pytest.approx(wanted, rel=1e-5)  # the tolerance of losses between layouts


def test_replayed_experts_of_packed_sequences_are_an_error(checkpoint, tmp_path):
    """Full sequences have as many rows as their pack, in another order."""
    path = checkpoint("qwen3_moe")
    config = AutoConfig.from_pretrained(path)
    shape = RoutedExperts.from_config(config)
    assert shape is not None

    def full(step: int) -> dict[str, Any]:
        batch = routed_batch(shape, config.num_layers, step)
        ones = torch.ones_like(batch["attention_mask"])
        return batch | {"attention_mask": ones, "input_ids": batch["input_ids"].clamp(min=1)}

    options = {"replay": "R3", "packing": True}
    with pytest.raises(Exception, match=r"R3 is not supported with use_sequence_packing: true"):
        run_ranks(1, losses_of_roll, path, tmp_path / "out", options, full, timeout=900)


LORA = {
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "additional_target": None,
    "autocast_adapter_dtype": True,
}
ADAPTED = {
    "tp2": ("llama", {TP: 2, SP: True}, ["all-linear"]),
    "pp2": ("qwen2", {PP: 2}, ["linear_qkv", "linear_proj"]),
    "dp2": ("llama", {}, ["q_proj", "down_proj"]),
    "ep2": ("qwen3_moe", {EP: 2, "moe_aux_loss_coeff": 0.0}, ["linear_qkv", "linear_proj", "down_proj"]),
    "all_of_ep2": ("qwen3_moe", {EP: 2, "moe_aux_loss_coeff": 0.0}, ["all-linear"]),
}


def train_adapter(path: Path, out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train an adapter, saving it after the first step; return losses and what ROLL sends."""
    strategy = train_strategy(path, out, options)
    strategy.model.model.save_pretrained_as_hf(out / "initial", overwrite=True)
    losses = train_steps(strategy, range(1))
    strategy.save_checkpoint(str(out / "saved"), global_step=1, ckpt_id="1")
    losses += train_steps(strategy, range(1, 3))
    info = {"micro_batch_size": 2, "loss_mask_keys": []}
    return {
        "losses": losses if strategy.worker.rank_info.is_pipeline_last_stage else None,
        "sent": sent_by_roll(strategy.models_unwrapped),
        "exported": dict(strategy.model.model.export_weights(per_expert=True)),
        "config": strategy.models_unwrapped[0].peft_config["default"].to_dict(),
        "reference": log_probs_of_roll(strategy, info | {"disable_adapter": True}),
        "policy": log_probs_of_roll(strategy, info),
    }


def continue_adapter(path: Path, out: Path, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Load what `train_adapter` saved and take its last steps; return the adapter."""
    strategy = train_strategy(path, out, options)
    strategy.load_checkpoint(str(out / "saved"))
    train_steps(strategy, range(1, 3))
    return dict(strategy.model.model.export_weights(per_expert=True))


def sent_by_roll(models: Any) -> dict[str, torch.Tensor]:
    from roll.third_party.megatron import model_update

    meta = model_update.gather_weights_meta_cross_pp(models)
    return {
        name: tensor
        for pairs in model_update.gather_all_hf_weights(models, 20_000, meta)
        for name, tensor in pairs
    }


def log_probs_of_roll(strategy: Any, info: dict[str, Any]) -> torch.Tensor | None:
    """Return the log-probabilities of ROLL's forward step; None where it returns none."""
    from roll.distributed.scheduler.protocol import DataProto

    def log_probs(data: Any, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ids, mask = data.batch["input_ids"], data.batch["attention_mask"]
        found = strategy.op_compute_log_probs(logits, ids, mask)
        return found.sum(), {"log_probs": found.clone().detach()}

    with torch.no_grad():
        found = strategy.forward_step(DataProto.from_dict(batch_of(0), meta_info=info), log_probs)
    return None if found is None else torch.as_tensor(found["log_probs"])


def log_probs_of(model: Any) -> torch.Tensor:
    batch = batch_of(0)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # Megatron's own checkpoints
@pytest.mark.parametrize("layout", ADAPTED)
def test_lora_has_the_losses_of_peft(layout, checkpoint, tmp_path):
    """The adapter is trained as PEFT's, sent under its names, left out for the reference, and resumes bit for bit."""
    from peft import PeftModel

    case, options, targets = ADAPTED[layout]
    path = checkpoint(case)
    options = options | {"lora": LORA | {"lora_target": targets}}
    found = run_ranks(2, train_adapter, path, tmp_path / "out", options, timeout=900)
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    before = log_probs_of(base)
    model = PeftModel.from_pretrained(base, tmp_path / "out/initial", is_trainable=True)
    wanted, after = reference_losses(model), log_probs_of(model)
    if (
        layout == "all_of_ep2"
    ):  # PEFT has one lora_A for gate_proj and up_proj of an expert, engines and mca two
        wanted, after = (
            next(rank[key] for rank in found if rank[key] is not None) for key in ("losses", "policy")
        )
    assert any(rank["losses"] for rank in found)
    for rank in found:
        assert rank["losses"] is None or rank["losses"] == pytest.approx(wanted, rel=1e-5)  # between layouts
        assert rank["sent"].keys() == rank["exported"].keys()
        assert all(rank["sent"][name].equal(rank["exported"][name]) for name in rank["sent"])
        assert {name.split(".")[-3] for name in rank["sent"]} == set(rank["config"]["target_modules"])
        for key, expected in (("reference", before), ("policy", after)):
            if rank[key] is not None:  # 1e-4: fp32 logits of two implementations
                torch.testing.assert_close(rank[key], expected, rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-3
    for again in run_ranks(2, continue_adapter, path, tmp_path / "out", options, timeout=900):
        assert all(again[name].equal(found[0]["exported"][name]) for name in again)


def image_batch(case: str, step: int) -> dict[str, Any]:
    """Return a batch whose rows have images or none, as ROLL's collator does."""
    import numpy as np

    ids, spans, images = rows_of(case)
    drawn = torch.Generator().manual_seed(step)
    words = torch.randint(1, 60, ids.shape, generator=drawn)
    ids = torch.where(ids < 64, words, ids)  # the placeholders stay
    mask = torch.ones_like(ids)
    padding = (0, LENGTH - ids.shape[1])
    response = mask.clone()
    response[:, :6] = 0
    media = np.empty(len(ids), dtype=object)
    media[:] = [dict(each) for each in images]
    batch = {"input_ids": ids, "attention_mask": mask, "response_mask": response}
    padded: dict[str, Any] = {name: torch.nn.functional.pad(x, padding) for name, x in batch.items()}
    sections = torch.stack([torch.from_numpy(positions(LENGTH, row)) for row in spans])
    return padded | {"multi_modal_inputs": media, "position_ids": sections}


def image_logits(model: Any, micro: dict[str, Any]) -> torch.Tensor:
    """Return the logits of transformers, whose rows are not padded: attention is causal."""
    length = int(micro["attention_mask"].sum(1)[0])
    ids = micro["input_ids"][:, :length]
    logits = logits_of(model, ids, tuple(micro["multi_modal_inputs"]))
    return torch.nn.functional.pad(logits, (0, 0, 0, LENGTH - length))


WITH_IMAGES = {
    "dp1": ("qwen2_5_vl", {}),
    "tp2": ("qwen2_5_vl", {TP: 2, SP: True}),
    "cp2": ("qwen2_5_vl", {CP: 2}),
    "pp2": ("qwen3_vl", {PP: 2}),
    "videos_tp2": ("qwen2_5_vl-video", {TP: 2, SP: True}),
    "videos_pp2": ("qwen3_vl-video", {PP: 2}),
}


def train_on_images(path: Path, out: Path, options: dict[str, Any], batches: Any) -> Any:
    """Return the losses of ROLL's strategy, and the tensors that differ between its stream and the exported ones."""
    strategy = train_strategy(path, out, options)
    losses = train_steps(strategy, range(3), batches=batches)
    sent, exported = sent_by_roll(strategy.models_unwrapped), dict(strategy.model.model.export_weights())
    assert sent.keys() == exported.keys()
    assert all(sent[name].equal(exported[name]) for name in sent)
    return losses if strategy.worker.rank_info.is_pipeline_last_stage else None


@pytest.mark.parametrize("layout", WITH_IMAGES)
def test_images_have_the_losses_of_transformers(layout, tmp_path, monkeypatch):
    from tokenizers_for_tests import byte_tokenizer

    monkeypatch.chdir(tmp_path)
    case, options = WITH_IMAGES[layout]
    path = tmp_path / "model"
    vision_model(case).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(path, attn_implementation="eager")
    batches = partial(image_batch, case)
    wanted = reference_losses(model, batches=batches, logits_of=image_logits)
    ranks = 1 if layout == "dp1" else 2
    found = run_ranks(ranks, train_on_images, path, tmp_path / "out", options, batches, timeout=900)
    assert any(found)
    for losses in filter(None, found):
        assert losses == pytest.approx(wanted, rel=1e-5)  # the tolerance of losses between layouts
