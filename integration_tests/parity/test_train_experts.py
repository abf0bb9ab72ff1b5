"""Experts that are cut otherwise than the rest train as transformers and peft train them on one process.

Two clipped AdamW steps: losses, gradient norms and every tensor after them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_hf import save

from cases import needed
from harness import run_ranks
from reference import make_reference
from train_cases import arguments, history, quietly

pytestmark = pytest.mark.ranks

STEPS, ROWS, LENGTH = 2, 4, 24
RATE, CLIP, EPSILON = 1e-2, 0.3, 1e-3  # norms are about 1; a large epsilon keeps noise from being a step
LORA = {
    "r": 4,
    "lora_alpha": 8,
    "init_lora_weights": False,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TP4 = TP2 | {"tensor_model_parallel_size": 4}
PP2, EP2 = {"pipeline_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
ETP1, ETP2 = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
SPLIT = {"use_distributed_optimizer": True}
# name -> ranks, settings
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "etp2-allgather": (2, ETP2 | {"moe_token_dispatcher_type": "allgather"}),
    "tp2-etp1-split": (2, TP2 | ETP1 | SPLIT),
    "tp4-etp2": (4, TP4 | ETP2),
    "pp2-etp2-split": (4, PP2 | ETP2 | SPLIT),
}
ADAPTED: dict[str, tuple[int, dict[str, Any]]] = {
    "etp2-split": (2, ETP2 | SPLIT),
    "tp2-etp1": (2, TP2 | ETP1),
    "tp4-ep2-etp2-split": (4, TP4 | EP2 | ETP2 | SPLIT),
    "ep2-etp2": (4, EP2 | ETP2),
}


@dataclass(frozen=True)
class Trained:
    """A run.

    Args:
        losses: Of each step.
        norms: Of the gradients, before clipping.
        path: What was saved after it.
    """

    losses: list[float]
    norms: list[float]
    path: Path


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}


def rows() -> list[np.ndarray[Any, Any]]:
    """Samples of different lengths."""
    draw = np.random.default_rng(3)
    return [draw.integers(1, 70, draw.integers(LENGTH // 2, LENGTH + 1)) for _ in range(STEPS * ROWS)]


def in_plain_torch(model: Any, path: Path, clip: float = CLIP) -> Trained:
    """The run that the others are compared with."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, eps=EPSILON, weight_decay=0.0)
    found = Trained([], [], path)
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows()], batch_first=True)
    for batch in padded.split(ROWS):
        logits = model(batch, attention_mask=(batch != 0).long(), use_cache=False).logits[:, :-1]
        labels = batch[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip)))
        found.losses.append(float(loss.detach()))
        optimizer.step()
    model.save_pretrained(path)
    return found


def by_megatron(
    base: Path, adapter: Path | None, output: Path, layouts: dict[str, dict[str, Any]]
) -> dict[str, Trained]:
    """A run on each layout. Runs on every rank."""
    return {name: run(base, adapter, output / name, settings) for name, settings in layouts.items()}


def run(base: Path, adapter: Path | None, output: Path, settings: dict[str, Any]) -> Trained:
    from megatron.core import parallel_state

    from mca_models import AutoModel
    from mca_models.megatron.peft import load_adapter
    from mca_train import McaTrainer, TokenDataset

    fixed = {"max_steps": STEPS, "learning_rate": RATE, "adam_epsilon": EPSILON, "max_grad_norm": CLIP}
    fixed |= {
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "moe_aux_loss_coeff": 0.0,
    }
    args = arguments(output / "run", train_sampling_strategy="sequential", **(fixed | settings))
    model = AutoModel.from_pretrained(base, args)
    args.gradient_accumulation_steps = ROWS // parallel_state.get_data_parallel_world_size()
    model = model if adapter is None else load_adapter(model, adapter)
    data = TokenDataset.from_samples([(row, np.ones(len(row), bool)) for row in rows()])
    trainer = quietly(lambda: McaTrainer(model=model, args=args, train_dataset=data))
    quietly(trainer.train)
    model.save_pretrained_as_hf(output / "hf")
    return Trained(history(trainer, "loss"), history(trainer, "grad_norm"), output / "hf")


def on_all(
    layouts: dict[str, tuple[int, dict[str, Any]]], base: Path, adapter: Path | None, output: Path
) -> dict[str, Trained]:
    found: dict[str, Trained] = {}
    for size in sorted({size for size, _ in layouts.values()}):
        some = {name: settings for name, (ranks, settings) in layouts.items() if ranks == size}
        found |= run_ranks(size, by_megatron, base, adapter, output, some, timeout=400)[0]
    return found


def compare(expected: Trained, found: Trained, start: dict[str, torch.Tensor], clip: float = CLIP) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert min(expected.norms) > 2 * clip
    right, ours = tensors(expected.path), tensors(found.path)
    assert ours.keys() == right.keys()
    moved = {name: float((x - start[name]).abs().max()) for name, x in right.items()}
    for name, x in right.items():
        allowed = 1e-3 * max(moved[name], 1e-2 * max(moved.values()))
        assert float((ours[name] - x).abs().max()) < allowed, name


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference("mixtral", tmp_path_factory.mktemp("base")).path


def from_base(base: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()


@pytest.fixture(scope="module")
def whole(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trained, dict[str, Trained]]:
    """The whole model, trained in plain torch and on each layout."""
    folder = tmp_path_factory.mktemp("whole")
    return in_plain_torch(from_base(base), folder / "torch"), on_all(
        {name: LAYOUTS[name] for name in needed(request, "name")}, base, None, folder
    )


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import peft

    path = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(5)
    peft.get_peft_model(from_base(base), peft.LoraConfig(**LORA)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapted(
    request: pytest.FixtureRequest, base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trained, dict[str, Trained]]:
    """An adapter on it, trained by peft and on each layout."""
    import peft

    folder = tmp_path_factory.mktemp("adapted")
    model = peft.PeftModel.from_pretrained(from_base(base), adapter, is_trainable=True)
    return in_plain_torch(model, folder / "torch"), on_all(
        {name: ADAPTED[name] for name in needed(request, "name")},
        base,
        adapter,
        folder,
    )


@pytest.mark.cases(0, always=["pp2-etp2-split"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_train_as_in_transformers(
    name: str, base: Path, whole: tuple[Trained, dict[str, Trained]]
) -> None:
    expected, found = whole
    compare(expected, found[name], tensors(base))


@pytest.mark.cases(0, always=["tp2-etp1"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_experts_train_as_in_peft(
    name: str, adapter: Path, adapted: tuple[Trained, dict[str, Trained]]
) -> None:
    expected, found = adapted
    compare(expected, found[name], tensors(adapter))


@pytest.mark.qualify
def test_three_of_eight_experts_cut_in_four_train_as_in_transformers(tmp_path: Path) -> None:
    """Experts are cut over all ranks and the rest over none, and every step is clipped to a small part."""
    clip, larger = 0.1, {"num_local_experts": 8, "num_experts_per_tok": 3, "initializer_range": 0.15}
    base = save("mixtral", tmp_path / "base", **larger)
    expected = in_plain_torch(from_base(base), tmp_path / "torch", clip)
    settings = {"expert_tensor_parallel_size": 4, "max_grad_norm": clip}
    for found in run_ranks(4, by_megatron, base, None, tmp_path, {"etp4": settings}, timeout=400):
        compare(expected, found["etp4"], tensors(base), clip)
