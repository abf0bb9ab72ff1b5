"""Effects of options of the optimizer and of recomputation on the parameters."""

from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from loss_curves import _BUILDERS, SMALL, worst
from mca_config.errors import McaError
from train_cases import tiny_checkpoint, trained

pytestmark = pytest.mark.ranks

FULL = {"recompute_granularity": "full"}
RECOMPUTATION: dict[str, list[dict[str, Any]]] = {
    "dense": [
        FULL | {"recompute_method": "uniform", "recompute_num_layers": 1},
        FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
        FULL | {"recompute_method": "block", "recompute_num_layers": 3},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    ],
    "biased": [{"recompute_granularity": "selective", "recompute_modules": ["mlp"]}],
    "moe": [
        FULL | {"recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    ],
    "latent": [
        FULL | {"recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "shared_experts"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "layernorm"]},
    ],
}


def moved(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name, tensor in one.items() if (tensor - other[name]).abs().max() > 1e-7}


def test_a_last_group_of_micro_batches_that_is_smaller_trains_the_same(tmp_path):
    checkpoint, steps = (
        tiny_checkpoint(tmp_path / "model", **SMALL),
        {"gradient_accumulation_steps": 6, "count": 11},
    )
    groups = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "microbatch_group_size_per_vp_stage": 4,
    }
    ((_, alone),) = run_ranks(1, trained, checkpoint, tmp_path / "one", **steps)
    for _, logged in run_ranks(2, trained, checkpoint, tmp_path / "two", **steps, **groups):
        for key, values in logged.items():
            assert values == pytest.approx(alone[key], rel=1e-5), key  # sums in fp32, in another order


def with_biases(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return tiny_checkpoint(folder, Qwen2Config, Qwen2ForCausalLM, **SMALL)


def decayed(checkpoint: Path, output: Path) -> tuple[set[str], set[str]]:
    """Return the parameters that weight decay changes, and all matrices."""
    without, _ = trained(checkpoint, output, max_steps=1, weight_decay=0.0)
    with_decay, _ = trained(checkpoint, output, max_steps=1, weight_decay=0.5)
    return moved(without, with_decay), {name for name, tensor in without.items() if tensor.dim() > 1}


def test_matrices_decay_biases_and_norms_do_not(tmp_path):
    ((changed, matrices),) = run_ranks(1, decayed, with_biases(tmp_path / "model"), tmp_path)
    assert changed == matrices


def apart(checkpoint: Path, output: Path, **changes: Any) -> tuple[set[str], set[str]]:
    """Return the parameters that change while embedding and output have rate 0, and all names."""
    before, _ = trained(checkpoint, output, weight_decay=0.0, learning_rate=1e-12, **changes)
    after, logged = trained(checkpoint, output, weight_decay=0.0, decoupled_lr=1e-12, **changes)
    assert min(logged["learning_rate"]) > 1e-4
    return moved(before, after), set(before)


@pytest.mark.parametrize("changes", [{}, {"use_distributed_optimizer": True}])
def test_decoupled_lr_is_the_rate_of_embedding_and_output_layer(changes, tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model", **SMALL)
    ((changed, names),) = run_ranks(1, apart, checkpoint, tmp_path, **changes)
    assert names - changed == {"embedding.word_embeddings.weight", "output_layer.weight"}


def with_mlp_biases(folder: Path) -> Path:
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    return tiny_checkpoint(folder, Starcoder2Config, Starcoder2ForCausalLM, **SMALL, use_bias=True)


BUILDERS = _BUILDERS | {"biased": with_mlp_biases}


def recomputed(folder: Path, output: Path, model: str) -> list[tuple[dict[str, Any], float, float]]:
    BUILDERS[model](folder)
    _, plain = trained(folder, output)
    found = []
    for changes in RECOMPUTATION[model]:
        _, logged = trained(folder, output, **changes)
        found.append((changes, *(worst(plain[key], logged[key]) for key in ("loss", "grad_norm"))))
    return found


@pytest.mark.cases(0, always=["dense", "latent"])
@pytest.mark.parametrize("model", RECOMPUTATION)
def test_recomputation_changes_nothing(model, tmp_path):
    (found,) = run_ranks(1, recomputed, tmp_path / "model", tmp_path, model)
    assert len(found) == len(RECOMPUTATION[model])
    for changes, loss, grad_norm in found:
        assert loss < 1e-6, changes
        assert grad_norm < 1e-5, changes


LORA = {"lora_rank": 4, "lora_target_modules": ["q_proj", "k_proj", "down_proj", "gate_proj"]}


def held_and_trained(checkpoint: Path, output: Path) -> tuple[int, int]:
    """Parameters of this rank of an adapted model, and those that are trained."""
    from mca_models import AutoModel
    from mca_models.megatron.peft import get_peft_model
    from mca_train.config.arguments import LoraArguments
    from train_cases import arguments

    args = arguments(output, tensor_model_parallel_size=2)
    model = get_peft_model(AutoModel.from_pretrained(checkpoint, args), LoraArguments(**LORA).config())
    parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def test_the_plan_of_an_adapter_counts_what_ranks_hold(tmp_path):
    from mca_models.lora.config import AdapterConfig
    from mca_train.config.arguments import LoraArguments
    from mca_train.config.model import model_config
    from planned_training import make_plan
    from train_cases import arguments

    checkpoint = tiny_checkpoint(tmp_path / "model", **SMALL)
    args = arguments(tmp_path / "out", tensor_model_parallel_size=2)
    config, adapter = model_config(str(checkpoint)), AdapterConfig.from_dict(LoraArguments(**LORA).config())
    plan = make_plan(config, args, 32, 2, adapter=adapter, reference=config)
    (stage,) = plan.stages
    for held, trainable in run_ranks(2, held_and_trained, checkpoint, tmp_path):
        assert stage.parameters == held
        assert stage.gradients == 4 * trainable
        assert stage.optimizer == 8 * trainable
    assert stage.reference == stage.weights - 4 * (stage.gradients // 4)


def test_the_plan_of_an_offloaded_optimizer_moves_its_state(tmp_path):
    from mca_train.config.model import model_config
    from planned_training import make_plan
    from train_cases import arguments

    config = model_config(str(tiny_checkpoint(tmp_path / "model", **SMALL)))

    def stage(**changes: Any) -> Any:
        return make_plan(config, arguments(tmp_path / "out", bf16=True, **changes), 32, 1).stages[0]

    whole, half = stage(), stage(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    count = whole.parameters
    assert (whole.optimizer, whole.host) == (12 * count, 0)  # two moments and the fp32 weight
    assert (half.optimizer, half.host) == (
        8 * count,
        8 * count,
    )  # half of: moments, weights and gradients in fp32
    precise = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
    moved = stage(optimizer_cpu_offload=True, **precise)
    assert (moved.optimizer, moved.host) == (0, 16 * count)


def stopped_by_nan(checkpoint: Path, output: Path) -> str:
    with pytest.raises(McaError) as found:
        trained(checkpoint, output, learning_rate=1e29, check_for_nan_in_grad=True)
    return str(found.value)


def test_nan_before_gradients_are_reduced_is_reported_in_one_line(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model", **SMALL)
    (reported,) = run_ranks(1, stopped_by_nan, checkpoint, tmp_path)
    assert reported.startswith("check_for_nan_in_grad: found NaN in local grad norm"), reported
    assert "\n" not in reported
