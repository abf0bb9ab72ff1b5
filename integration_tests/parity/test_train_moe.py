"""Experts, MLA and MTP layers train alike on every layout, and their losses are logged apart."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import tiny_vision

from harness import run_in_turn, run_ranks
from reference import make_reference
from train_cases import arguments, history, quietly, sparse_checkpoint, tiny_checkpoint, tokens

pytestmark = pytest.mark.ranks

KEYS = ("loss", "grad_norm", "eval_loss", "moe_load_balancing_loss", "mtp_1_loss")
AUX = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# case -> settings of all its runs, layouts
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, dict[str, Any]]]]] = {
    "qwen3_moe": (
        {},
        {
            "ep2": (2, {"expert_model_parallel_size": 2, "gradient_accumulation_steps": 2}),
            "pp2": (2, {"pipeline_model_parallel_size": 2}),
            "tp2-sp-etp2": (2, SP | {"expert_tensor_parallel_size": 2}),
        },
    ),
    "deepseek_v3": ({}, {"pp2": (2, {"pipeline_model_parallel_size": 2}), "tp2-sp": (2, SP)}),
}


def losses(checkpoint: Path, output: Path, **changes: Any) -> dict[str, list[float]]:
    from mca_models import AutoModel
    from mca_train import McaTrainer

    run = {"max_steps": 2, "learning_rate": 1e-3, "gradient_accumulation_steps": 4, "warmup_steps": 0}
    args = arguments(output, **(run | changes))
    model = AutoModel.from_pretrained(checkpoint, args)
    trainer = quietly(
        lambda: McaTrainer(model=model, args=args, train_dataset=tokens(8), eval_dataset=tokens(4))
    )
    quietly(trainer.train)
    quietly(trainer.evaluate)
    return {key: history(trainer, key) for key in KEYS}


def worst(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max((abs(a - b) / abs(a) for a, b in zip(one, other, strict=True)), default=0.0)


@pytest.mark.cases(0, always=["qwen3_moe"])
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_the_single_process_run(case, tmp_path, every_case):
    checkpoint = make_reference(case, tmp_path).path
    settings, layouts = CASES[case]
    if not every_case:  # the test of balancing losses compares the same on stages
        layouts = {name: layout for name, layout in layouts.items() if name != "pp2"}
    single = run_ranks(1, losses, checkpoint, tmp_path / "one", **settings)[0]
    assert len(single["loss"]) == 2
    assert {size for size, _ in layouts.values()} == {2}
    calls = [
        partial(losses, checkpoint, tmp_path / name, **(settings | changes))
        for name, (_, changes) in layouts.items()
    ]
    for name, found in zip(layouts, run_in_turn(2, *calls), strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "mtp_1_loss"):
            assert worst(single[key], found[0][key]) < 1e-4, (name, key)
        assert all(rank["loss"] == found[0]["loss"] for rank in found)


def test_balancing_losses_are_logged_apart(tmp_path):
    checkpoint = make_reference("qwen3_moe", tmp_path).path
    single = run_ranks(1, losses, checkpoint, tmp_path / "one", **AUX)[0]
    staged = run_ranks(2, losses, checkpoint, tmp_path / "two", pipeline_model_parallel_size=2, **AUX)
    assert len(single["moe_load_balancing_loss"]) == 2
    assert min(single["moe_load_balancing_loss"]) > 0.5  # 1 where all experts get as much
    for rank in staged:
        for key in ("moe_load_balancing_loss", "loss", "grad_norm", "eval_loss"):
            assert worst(single[key], rank[key]) < 1e-4, key
        assert rank["loss"] == staged[0]["loss"]


def predicting(checkpoint: Path, output: Path, **changes: Any) -> dict[str, list[float]]:
    """A random model with an MTP layer."""
    from mca_models import AutoModel
    from mca_models.templates import config_from_hf
    from mca_train import McaTrainer

    run = {"max_steps": 2, "learning_rate": 1e-3, "gradient_accumulation_steps": 4, "warmup_steps": 0}
    args = arguments(output, **(run | changes))
    described = json.loads((checkpoint / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    model = AutoModel.from_config(config_from_hf(described), args, dtype="float32")
    trainer = quietly(lambda: McaTrainer(model=model, args=args, train_dataset=tokens(4), pack_length=32))
    quietly(trainer.train)
    return {key: history(trainer, key) for key in KEYS}


def test_mtp_losses_are_logged_apart_and_packing_and_recomputation_change_nothing(tmp_path):
    checkpoint = make_reference("deepseek_v3", tmp_path).path
    one = partial(predicting, checkpoint, tmp_path / "one")
    in_packs = partial(predicting, checkpoint, tmp_path / "packed", sequence_packing=True)
    (single,), (packed,) = run_in_turn(1, one, in_packs)
    assert len(single["mtp_1_loss"]) == 2
    assert single["mtp_1_loss"] != single["loss"]
    changes = {"pipeline_model_parallel_size": 2, "sequence_packing": True} | RECOMPUTE
    staged = run_ranks(2, predicting, checkpoint, tmp_path / "staged", **changes)
    for rank in (packed, *staged):
        for key in ("loss", "grad_norm", "mtp_1_loss"):
            assert worst(single[key], rank[key]) < 1e-4, key
        assert rank["loss"] == staged[0]["loss"]


BALANCED = {"moe_aux_loss_coeff": 0.4, "moe_z_loss_coeff": 0.02, "moe_router_load_balancing_type": "aux_loss"}
WEIGHED = {
    1: {"single": {}, "recomputed": RECOMPUTE},
    2: {"tp2-sp": SP, "cp2": {"context_parallel_size": 2}},
}
"""Settings of runs on so many ranks."""


def answers(count: int) -> Any:
    """Samples of different lengths with few targets."""
    import numpy as np

    from mca_train import TokenDataset

    draw = np.random.default_rng(1)
    lengths = [10 + 5 * (number % 3) for number in range(count)]
    return TokenDataset.from_samples([(draw.integers(0, 64, n), np.arange(n) >= n - 4) for n in lengths])


def balanced_in_plain_torch(checkpoint: Path, weight: float = 0.4) -> dict[str, list[float]]:
    """Two steps of one batch of two samples; HF's balancing loss counts each of the two chosen experts apart."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    sees = "vision_config" in json.loads((checkpoint / "config.json").read_text())
    kind = AutoModelForMultimodalLM if sees else AutoModelForCausalLM
    model = kind.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    data: Any = answers(4)
    found: dict[str, list[float]] = {key: [] for key in ("loss", "grad_norm", *SIGNALS)}
    for first in (0, 2):
        rows = [data[first], data[first + 1]]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad([row["input_ids"] for row in rows], batch_first=True)
        labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
        mask = pad([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
        out = model(ids, attention_mask=mask, output_router_logits=True)
        entropy = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        valid = mask.flatten().bool()
        squares = [router.logsumexp(-1)[valid].square().mean() for router in out.router_logits]
        balance = out.aux_loss / 2
        (entropy + weight * balance + 0.02 * sum(squares)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        values = (entropy, norm, balance, sum(squares) / len(squares))
        for key, value in zip(found, values, strict=True):
            found[key].append(float(value.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found


SIGNALS = ("moe_load_balancing_loss", "moe_z_loss")


def balanced(checkpoint: Path, output: Path, **changes: Any) -> dict[str, list[float]]:
    from mca_models import AutoModel
    from mca_train import McaTrainer

    run = BALANCED | {"max_steps": 2, "learning_rate": 1e-3, "weight_decay": 0.0, "warmup_steps": 0}
    run |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_grad_norm": 1e9}
    run |= {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    args = arguments(output, **(run | changes))
    model = AutoModel.from_pretrained(checkpoint, args)
    trainer = quietly(lambda: McaTrainer(model=model, args=args, train_dataset=answers(4)))
    quietly(trainer.train)
    return {key: history(trainer, key) for key in ("loss", "grad_norm", *SIGNALS)}


def one_layer(folder: Path) -> Path:
    """HF balances the experts of all layers together, Megatron those of each: with one layer it is the same."""
    return sparse_checkpoint(folder, num_hidden_layers=1)


def test_experts_losses_weigh_what_hugging_faces_do(tmp_path):
    checkpoint = one_layer(tmp_path / "one")
    theirs = balanced_in_plain_torch(checkpoint)
    for size, runs in WEIGHED.items():
        calls = [partial(balanced, checkpoint, tmp_path / name, **changes) for name, changes in runs.items()]
        for name, ranks in zip(runs, run_in_turn(size, *calls), strict=True):
            for ours, (key, values) in product(ranks, theirs.items()):
                # the z-loss of a log is the mean of the ranks' means, whose tokens differ in number
                allowed = 8e-2 if key == "moe_z_loss" and size > 1 else 1e-4
                assert worst(values, ours[key]) < allowed, (name, key, values, ours[key])


def of_sigmoids(folder: Path) -> Path:
    """A MiniMax M2 of one layer: routers score by sigmoids, Hugging Face balances their softmax."""
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    sizes = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return tiny_checkpoint(folder, MiniMaxM2Config, MiniMaxM2ForCausalLM, **sizes)


ALONE: dict[str, Any] = {"num_hidden_layers": 1}
BEHIND_DENSE: dict[str, Any] = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
HUGGING_FACES: dict[str, dict[str, Any]] = {
    "glm4v_moe": {"num_hidden_layers": 2},
    "minimax_m3_vl_text": BEHIND_DENSE | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
}
HUGGING_FACES_TOO: dict[str, dict[str, Any]] = {
    "flex_olmo": ALONE,
    "ernie4_5_moe": ALONE | {"moe_layer_start_index": 0},
    "flint": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "gpt_oss": ALONE | {"layer_types": ["full_attention"]},
    "granitemoehybrid": ALONE | {"layer_types": ["full_attention"]},
    "granitemoeshared": ALONE,
    "mellum": BEHIND_DENSE | {"layer_types": ["full_attention"] * 2},
    "mixtral": ALONE,
    "olmoe": ALONE,
    "phimoe": ALONE,
    "qwen2_moe": {"num_hidden_layers": 2},
    "qwen3_5_moe_text": ALONE | {"layer_types": ["full_attention"]},
    "qwen3_next": ALONE | {"layer_types": ["full_attention"], "mlp_only_layers": []},
    "qwen3_vl_moe": ALONE,
}
"""Families with one layer of experts, and what differs from the tiny models of other tests."""


def of_config_json(checkpoints: dict[str, Path], output: Path) -> dict[str, list[dict[str, list[float]]]]:
    """Two steps of each in transformers, and here."""
    unsaid = {"moe_aux_loss_coeff": None, "moe_router_load_balancing_type": None}
    found = {}
    for name, path in checkpoints.items():
        biased = "e_score_correction_bias" in (path / "names").read_text()
        still = unsaid | ({"moe_router_bias_update_rate": 0.0} if biased else {})
        found[name] = [balanced_in_plain_torch(path, 2 * 0.4), balanced(path, output / name, **still)]
    return found


def made_with_a_coefficient(case: str, folder: Path, made: Any) -> Path:
    """Return the files that ``made`` writes to ``folder``, whose ``config.json`` asks for the loss."""
    from safetensors import safe_open

    made(folder)
    described = json.loads((folder / "config.json").read_text())
    text = described.get("text_config", described)
    text |= {"output_router_logits": True, "router_aux_loss_coef": 0.4}
    (folder / "config.json").write_text(json.dumps(described))
    with safe_open(folder / "model.safetensors", "pt") as file:
        (folder / "names").write_text(" ".join(file.keys()))
    return folder


def require_hugging_faces(made: dict[str, Any], folder: Path) -> None:
    checkpoints = {case: made_with_a_coefficient(case, folder / case, make) for case, make in made.items()}
    (found,) = run_ranks(1, of_config_json, checkpoints, folder / "runs")
    wrong = {
        (case, key): (values, ours[key])
        for case, (theirs, ours) in found.items()
        for key, values in theirs.items()
        if worst(values, ours[key]) > 1e-4
    }
    assert not wrong, wrong


def tiny(case: str, changes: dict[str, Any]) -> Any:
    module = tiny_vision if case in tiny_vision.CASES else tiny_hf
    return lambda folder: module.save(case, folder, **changes)


def test_the_coefficient_of_config_json_is_hugging_faces(tmp_path):
    made = {case: tiny(case, changes) for case, changes in HUGGING_FACES.items()}
    require_hugging_faces({"qwen3_moe": one_layer, "minimax_m2": of_sigmoids, **made}, tmp_path)


@pytest.mark.qualify
def test_so_it_is_where_routers_are_alike(tmp_path):
    require_hugging_faces(
        {case: tiny(case, changes) for case, changes in HUGGING_FACES_TOO.items()}, tmp_path
    )
