"""Routing replay: routers take given experts on every layout, and weigh them by their own scores.

Experts that the model chose itself change nothing; other experts give the log-probabilities and the gradients of a
transformers model whose routers are forced to take them.
"""

import copy
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cases import Case, as_params, group_by_ranks, needed, product
from forced_routing import forced_experts, other_experts
from harness import run_ranks
from layouts import arguments
from mca_config.errors import McaError
from mca_models.megatron.features.router_replay import LIVE, RoutedExperts
from reference import Reference, hf_model, make_reference

pytestmark = pytest.mark.ranks

LENGTHS = (24, 9, 17, 24)
"""Tokens of the rows, the rest of which is padding."""
MODELS = (
    *("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "longcat_flash"),
    *("cohere2_moe", "gemma4_text-experts"),
)
LAYOUTS = ("tp1", "tp2sp", "pp2vpp2", "cp2", "ep2", "tp2ep2etp1dp2sp", "cp2tp2sp", "tp2pp2")
CASES = product(MODELS, LAYOUTS)
DEFAULT = (
    *("qwen3_moe-cp2tp2sp", "mixtral-pp2vpp2"),
    *("ernie4_5_moe-tp1", "longcat_flash-tp1", "cohere2_moe-tp1", "glm4_moe-ep2"),
)


def log_probs_of(logits: Tensor, ids: Tensor) -> Tensor:
    chosen = logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(len(ids), 1), chosen], 1).float()


def shape_of(reference: Reference) -> RoutedExperts:
    from mca_models import AutoConfig

    shape = RoutedExperts.from_config(AutoConfig.from_pretrained(reference.path))
    assert shape is not None
    return shape


def forced_log_probs(reference: Reference, experts: Tensor) -> Tensor:
    """Return the log-probabilities of transformers' model, whose rows are not padded: attention is causal."""
    model = hf_model(reference.model)
    with torch.no_grad(), forced_experts(model, experts, shape_of(reference)):
        return log_probs_of(model(reference.input_ids, use_cache=False).logits, reference.input_ids)


def real_tokens() -> Tensor:
    return torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]


def compute(references: dict[Case, tuple[Reference, Tensor]]) -> dict[Case, dict[str, float]]:
    """Differences of each case; 0 where bits must be equal. Runs on every rank."""
    from mca_models.megatron import AutoModel

    found = {}
    for case, (reference, forced) in references.items():
        models = AutoModel.from_pretrained(reference.path, arguments(case.layout))
        found[case] = differences(models, reference, forced)
    return found


def differences(models: Any, reference: Reference, forced: Tensor) -> dict[str, float]:
    ids, mask = reference.input_ids, real_tokens()
    shape = RoutedExperts.from_config(models.config)
    assert shape is not None
    experts = other_experts(shape, *ids.shape)
    every = {"packed": {"packed": True, "micro_batch_size": 3}, "padded": {"micro_batch_size": 2}}
    chosen = {
        name: models.log_probs(ids, mask=mask, return_routed_experts=True, **options)
        for name, options in every.items()
    }
    own = chosen["padded"].routed_experts
    sent = torch.zeros(*own.shape[:-1], shape.num_experts, dtype=torch.bool)
    sent.scatter_(-1, own.long().clamp(min=0), True)
    expected = torch.stack([reference.experts[layer] for layer in shape.layers], 2)
    found = {
        "recorded": (sent != expected)[mask].float().sum(),
        "recorded padding": (own[~mask] != LIVE).float().sum(),
    }
    for name, options in every.items():
        live = chosen[name]
        again = models.log_probs(ids, mask=mask, routed_experts=live.routed_experts, **options)
        found[f"own {name}"] = (again.log_probs != live.log_probs).float().sum()
        other = models.log_probs(
            *(ids,), mask=mask, routed_experts=experts, return_routed_experts=True, **options
        )
        found[f"other {name}"] = ((other.log_probs - forced) * mask).abs().max() / 1e-5
        found[f"other {name} returned"] = (other.routed_experts != experts)[mask].float().sum()
    found["moved"] = float(
        (again.log_probs - forced)[mask].abs().max() < 1e-3
    )  # other experts give other values
    partial = torch.where(torch.arange(ids.shape[1])[:, None, None] < 5, experts, LIVE)
    partly = models.log_probs(
        *(ids,), routed_experts=partial, return_routed_experts=True, micro_batch_size=4
    ).routed_experts
    found["partly given"] = (partly[:, :5] != experts[:, :5]).float().sum()
    assert not any(choice.given is not None for chunk in models.chunks for _, choice in chunk.router_choices)
    return {key: float(value) for key, value in found.items()}


@pytest.fixture(scope="module")
def computed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, list[dict[str, float]]]:
    folder, found = tmp_path_factory.mktemp("routed"), {}
    for num_ranks, cases in group_by_ranks(needed(request)).items():
        references = {case: make_reference(case.model, folder, batch=len(LENGTHS)) for case in cases}
        given = {
            case: (each, forced_log_probs(each, other_experts(shape_of(each), *each.input_ids.shape)))
            for case, each in references.items()
        }
        ranks = run_ranks(num_ranks, compute, given, timeout=300)
        found |= {case: [rank[case] for rank in ranks] for case in cases}
    return found


@pytest.mark.cases(0, always=DEFAULT)
@pytest.mark.parametrize("case", as_params(CASES))
def test_replayed_experts_give_the_values_of_a_forced_transformers_model(
    case: Case, computed: dict[Case, list[dict[str, float]]]
) -> None:
    """Log-probabilities differ by less than 1e-5, as without replay; experts and the model's own choice not at all."""
    for found in computed[case]:
        assert all(value < 1 for value in found.values()), found


def forced_step(reference: Reference, experts: Tensor, folder: Path) -> dict[str, Tensor]:
    """Weights of transformers' model after one step of SGD with a rate of 1."""
    model = copy.deepcopy(hf_model(reference.model))
    mask = real_tokens()[:, 1:]
    with forced_experts(model, experts, shape_of(reference)):
        logits = model(reference.input_ids, use_cache=False).logits[:, :-1]
    labels = reference.input_ids[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    ((losses * mask.flatten()).sum() / mask.sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0 if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    return tensors(folder)


def tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}


def train_step(reference: Reference, experts: Tensor, folder: Path, changes: dict[str, Any]) -> None:
    """One step of SGD with a rate of 1. Runs on every rank."""
    from megatron.core import parallel_state

    from mca_models import AutoModel
    from mca_train import McaTrainer
    from train_cases import arguments as training_arguments
    from train_cases import quietly

    class Replaying(McaTrainer):
        requires_routed_experts = True

    fixed = {
        "max_steps": 1,
        "learning_rate": 1.0,
        "optimizer": "sgd",
        "max_grad_norm": 0.0,
        "warmup_steps": 0,
    }
    fixed |= {"lr_scheduler_type": "constant", "weight_decay": 0.0, "moe_aux_loss_coeff": 0.0}
    fixed |= {"gradient_accumulation_steps": len(LENGTHS), "train_sampling_strategy": "sequential"}
    args = training_arguments(folder / "run", **(fixed | changes))
    model = AutoModel.from_pretrained(reference.path, args)
    args.gradient_accumulation_steps //= parallel_state.get_data_parallel_world_size()
    data = [
        {"input_ids": reference.input_ids[row, :n], "routed_experts": experts[row, :n]}
        for row, n in enumerate(LENGTHS)
    ]
    trainer = quietly(lambda: Replaying(model=model, args=args, train_dataset=data))
    quietly(trainer.train)
    model.save_pretrained_as_hf(folder / "hf")


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PP2, TP2 = {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
PACKED = {"sequence_packing": True}
TRAINED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "pp2-recompute": (2, "deepseek_v3", PP2 | FULL),
    "cp2-packed": (2, "qwen3_moe", CP2 | PACKED),
    "tp2": (2, "qwen3_moe", TP2 | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "ep2": (2, "qwen3_moe", EP2),
    "pp2vpp2-recompute": (2, "mixtral", PP2 | FULL | {"virtual_pipeline_model_parallel_size": 2}),
    "tp2-cp2-packed-recompute": (4, "qwen3_moe", TP2 | CP2 | PACKED | FULL),
    "tp2-pp2-ep2": (4, "glm4_moe", TP2 | PP2 | EP2 | FULL | {"expert_tensor_parallel_size": 1}),
    "etp2-pp2": (4, "qwen3_moe", PP2 | {"expert_tensor_parallel_size": 2}),
}


@pytest.mark.cases(0, always=["pp2-recompute", "cp2-packed"])
@pytest.mark.parametrize("name", TRAINED)
def test_replayed_experts_give_the_gradients_of_a_forced_transformers_model(
    name: str, tmp_path: Path
) -> None:
    """Gradients differ by less than 1e-4 of the largest of their tensor, as without replay."""
    num_ranks, kind, settings = TRAINED[name]
    reference = make_reference(kind, tmp_path, batch=len(LENGTHS))
    experts = other_experts(shape_of(reference), *reference.input_ids.shape)
    expected = forced_step(reference, experts, tmp_path / "expected")
    run_ranks(num_ranks, train_step, reference, experts, tmp_path / name, settings, timeout=300)
    before, found = tensors(reference.path), tensors(tmp_path / name / "hf")
    largest = max(float((x - before[key]).abs().max()) for key, x in expected.items())
    for key, right in expected.items():
        if key.endswith("e_score_correction_bias"):
            layer = shape_of(reference).layers.index(int(key.split(".")[2]))
            load = experts[real_tokens()][:, layer].flatten().bincount(minlength=len(right))
            right = before[key] + 1e-3 * (load.float().mean() - load).sign()  # Megatron's rule
        scale = max(float((right - before[key]).abs().max()), 1e-3 * largest)
        assert float((found[key] - right).abs().max()) < 1e-4 * scale + 1e-7, key


def rejected(sparse: Path, dense: Path) -> list[str]:
    """Errors of wrong experts. Runs on two tensor-parallel ranks."""
    from mca_models.megatron import AutoModel

    rank = torch.distributed.get_rank()
    models = AutoModel.from_pretrained(sparse, arguments("tp2sp"))
    plain = AutoModel.from_pretrained(dense, arguments("tp2sp"))
    shape = RoutedExperts.from_config(models.config)
    assert shape is not None
    ids, said = torch.zeros(2, 8, dtype=torch.int64), []
    experts = other_experts(shape, *ids.shape)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (models, {"routed_experts": other_experts(shape, *ids.shape, seed=rank)}),
        (models, {"routed_experts": experts if rank else None}),
        (models, {"routed_experts": experts[:, :7]}),
        (models, {"routed_experts": experts[..., :1] if rank else experts}),  # wrong on one rank alone
        (plain, {"routed_experts": experts}),
        (plain, {"return_routed_experts": True}),
    ]
    for model, options in calls:
        with pytest.raises(McaError) as error:
            model.log_probs(ids, **options)
        said.append(str(error.value))
    for setting, value in (("moe_router_fusion", True), ("moe_router_load_balancing_type", "sinkhorn")):
        before = getattr(models.megatron, setting)
        setattr(models.megatron, setting, value)
        with pytest.raises(McaError) as error:
            models.log_probs(ids, routed_experts=experts)
        said.append(str(error.value))
        setattr(models.megatron, setting, before)
    _, choice = models.chunks[0].router_choices[1]
    with patch.object(choice, "get_replay_topk", lambda *_: _[-1](*_[:2])), pytest.raises(McaError) as error:
        models.log_probs(ids, routed_experts=experts)
    said.append(str(error.value))
    assert torch.isfinite(models.log_probs(ids, routed_experts=experts).log_probs).all()
    return said


def test_wrong_experts_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    paths = [make_reference(kind, tmp_path).path for kind in ("qwen3_moe", "qwen3")]
    said, other = run_ranks(2, rejected, *paths)
    assert other == said
    differ = (
        "ranks 0 and 1, of one replica, have different routed_experts or media; broadcast them with the "
        "tokens"
    )
    fused = "routed_experts are not supported with moe_router_"
    assert said[:2] == [differ, differ]
    assert said[2].startswith(
        "routed_experts has shape [2, 7, 4, 2]; expected [2, 8, layers, topk], as input_ids"
    )
    assert said[3].startswith("routed_experts has 1 experts per token and layer; the model routes to 2")
    assert said[4] == "routed_experts needs a model with experts, but qwen3 is dense; remove it"
    assert said[5] == "return_routed_experts needs a model with experts, but qwen3 is dense; remove it"
    assert said[6] == f"{fused}fusion, whose kernel chooses; set it to false"
    assert said[7] == f"{fused}load_balancing_type sinkhorn; set another one"
    assert said[8] == "routed_experts: the routers of layers [2] ignored the given experts"


def own_choice(path: Path, folder: Path) -> list[list[float]]:
    """Losses and norms of a step and an evaluation with the experts of the start, and without. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from train_cases import history, make_trainer, quietly

    rows = [torch.arange(n) * 7 % 60 for n in LENGTHS]
    found = []
    models = AutoModel.from_pretrained(path, arguments("tp2sp"))
    given = [models.log_probs(row[None], return_routed_experts=True).routed_experts[0] for row in rows]
    for experts in (given, None):
        data = [{"input_ids": row} for row in rows]
        if experts is not None:
            data = [sample | {"routed_experts": each} for sample, each in zip(data, experts, strict=True)]
        options = {
            "train_dataset": data,
            "eval_dataset": data,
            "max_steps": 1,
            "gradient_accumulation_steps": 2,
            "warmup_steps": 0,
            **TP2,
            **FULL,
        }
        options |= {"learning_rate": 0.0, "sequence_packing": True, "pack_length": 64}
        trainer = make_trainer(path, folder, **options)
        quietly(trainer.train)
        quietly(trainer.evaluate)
        found.append(
            [*history(trainer, "loss"), *history(trainer, "grad_norm"), *history(trainer, "eval_loss")]
        )
    return found


def test_training_with_the_models_own_choice_changes_no_bit(tmp_path: Path) -> None:
    """Weights stay the same with a learning rate of 0, so the experts of the start stay the model's own choice."""
    path = make_reference("qwen3_moe", tmp_path).path
    for replayed, live in run_ranks(2, own_choice, path, tmp_path):
        assert replayed == live
        assert len(live) == 3


def preference_losses(path: Path, other: Path, folder: Path) -> list[float]:
    """Losses of pairs against the model itself, which takes their experts, and against one with other routers."""
    from mca_models import AutoModel
    from mca_train import DpoTrainer
    from train_cases import arguments as run_arguments
    from train_cases import quietly

    args = run_arguments(folder)
    model = AutoModel.from_pretrained(path, args)
    shape = RoutedExperts.from_config(model.config)
    assert shape is not None
    rows = [torch.arange(n) * 7 % 60 for n in LENGTHS]
    pairs: list[dict[str, Tensor]] = []
    for number, row in enumerate(rows):
        pair: dict[str, Tensor] = {}
        for side, tokens in (("chosen", row), ("rejected", row.flip(0))):
            experts = other_experts(shape, 1, len(tokens), seed=number)[0]
            pair |= {f"{side}_input_ids": tokens, f"{side}_labels": tokens, f"{side}_routed_experts": experts}
        pairs.append(pair)
    live = [{name: value for name, value in pair.items() if "experts" not in name} for pair in pairs]

    def evaluated(reference: Path, data: list[dict[str, Tensor]]) -> tuple[float, float, float]:
        """Loss, and the mean log-probability of chosen answers of the policy and of the reference."""
        trainer = quietly(
            lambda: DpoTrainer(
                model=model,
                args=args,
                eval_dataset=data,
                reference=AutoModel.from_pretrained(reference, args),
            )
        )
        logged = quietly(trainer.evaluate)
        policy = logged["eval_logps/chosen"]
        return logged["eval_loss"], policy, policy - logged["eval_rewards/chosen"] / trainer.preference.beta

    own, foreign, alone = evaluated(path, pairs), evaluated(other, pairs), evaluated(other, live)
    return [own[0], abs(own[1] - alone[1]), abs(foreign[2] - alone[2])]


def test_the_reference_takes_the_experts_if_its_routers_are_those_of_the_policy(tmp_path: Path) -> None:
    """Equal weights with equal experts have equal log-probabilities, so the loss is log 2 to the bit of fp32."""
    path, other = (make_reference(name, tmp_path).path for name in ("qwen3_moe", "deepseek_v3"))
    own, moved, foreign = run_ranks(1, preference_losses, path, other, tmp_path)[0]
    assert own == pytest.approx(math.log(2), rel=1e-7)
    assert moved > 1e-3  # the policy took the given experts
    assert foreign < 1e-3  # fp32 of log-probabilities near 100, and of rewards divided by beta
