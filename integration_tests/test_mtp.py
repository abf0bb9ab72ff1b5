"""Multi-token prediction: loss, gradients and export equal a plain PyTorch model on transformers' layers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from harness import run_ranks
from layouts import arguments, world_size
from mca_models.megatron import platform
from reference import Reference, hf_model, make_reference
from test_gradient_parity import TOLERANCE, export_gradient, read, worst_errors

pytestmark = pytest.mark.ranks

CASE, BATCH, SCALE = "deepseek_v3", 4, 0.3
LAYOUTS = ("tp1", "pp2", "ep2", "tp2sp", "pp2vpp2ep2", "tp2ep2etp1")
LAST = "model.layers.4."


class WithPrediction(torch.nn.Module):
    """transformers' DeepSeek V3 and one prediction layer."""

    def __init__(self) -> None:
        super().__init__()
        self.main = copy.deepcopy(hf_model(CASE))
        generator = torch.Generator().manual_seed(3)
        size = self.main.config.hidden_size
        norm = type(self.main.model.norm)
        self.enorm, self.hnorm, self.head_norm = (norm(size, self.main.config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = copy.deepcopy(self.main.model.layers[-1])
        with torch.no_grad():
            for tensor in [*self.own().values()]:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * 0.15 + (1 if tensor.dim() < 2 else 0))

    def own(self) -> dict[str, torch.Tensor]:
        """The tensors around the prediction layer, by their names in checkpoints."""
        return {
            "enorm.weight": self.enorm.weight,
            "hnorm.weight": self.hnorm.weight,
            "eh_proj.weight": self.eh_proj.weight,
            "shared_head.norm.weight": self.head_norm.weight,
        }

    def loss(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Next-token loss plus the scaled loss for the token after.

        megatron-core 0.16 divides both sums by the number of next-token targets, later versions each by its own.
        """
        main, predicted = self.both_logits(input_ids)
        entropy = cross_entropy(main[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        further = cross_entropy(predicted[:, :-2].flatten(0, 1), input_ids[:, 2:].flatten(), reduction="sum")
        lost = 1 if platform.megatron_version() < (0, 17) else 2
        return entropy + SCALE * further / input_ids[:, lost:].numel()

    def both_logits(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's logits ``[b, s, vocab]`` and the prediction layer's."""
        inner = self.main.model
        hidden = inner(input_ids, use_cache=False).last_hidden_state
        following = inner.embed_tokens(input_ids.roll(-1, 1))
        mixed = self.eh_proj(torch.cat([self.enorm(following), self.hnorm(hidden)], -1))
        length = input_ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rotary = inner.rotary_emb(mixed, torch.arange(length)[None])
        out = self.layer(mixed, attention_mask=mask, position_embeddings=rotary)
        return self.main.lm_head(hidden), self.main.lm_head(self.head_norm(out))

    def save(self, path: Path) -> Path:
        """A checkpoint as DeepSeek publishes them: the prediction layer numbered after the others."""
        self.main.save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        alone = copy.deepcopy(self.main)
        alone.model.layers[-1] = self.layer
        alone.save_pretrained(path / "layer")
        moved = load_file(path / "layer" / "model.safetensors")
        tensors |= {n.replace("model.layers.3.", LAST): x for n, x in moved.items() if ".layers.3." in n}
        tensors |= {f"{LAST}{name}": x.detach() for name, x in self.own().items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, its gradients as transformers' autograd has them, and those of every layout."""
    folder = tmp_path_factory.mktemp("mtp")
    plain = make_reference(CASE, folder, batch=BATCH)
    model = WithPrediction()
    reference = Reference(CASE, model.save(folder / "with"), plain.input_ids, plain.logits)
    model.loss(reference.input_ids).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save(folder / "expected")
    for layout in LAYOUTS:
        run_ranks(world_size(layout), run, reference, layout, folder)
    return folder


def run(reference: Reference, layout: str, folder: Path) -> None:
    """Exports the model unchanged, its gradients, and checks its logits. Runs on every rank."""
    from mca_models.megatron import AutoModel

    settings: dict[str, Any] = {"mtp_loss_scaling_factor": SCALE}
    model = AutoModel.from_pretrained(reference.path, arguments(layout, **settings))
    assert float((model.logits(reference.input_ids) - reference.logits).abs().max()) <= 1e-4
    model.save_pretrained_as_hf(folder / f"{layout}-hf")
    model.save_pretrained(folder / f"{layout}-mca")
    export_gradient(reference, layout, folder / f"{layout}-gradients", **settings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prediction_gradients_equal_autograd(layout: str, folder: Path) -> None:
    worst = worst_errors(folder / "expected", folder / f"{layout}-gradients")
    assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prediction_layers_are_exported_bit_for_bit(layout: str, folder: Path) -> None:
    source, export = read(folder / "with"), read(folder / f"{layout}-hf")
    assert source.keys() == export.keys()
    assert all(torch.equal(source[name], export[name]) for name in source)


def without(path: Path, folder: Path) -> list[str]:
    from mca_models.megatron import AutoModel

    model = AutoModel.from_pretrained(path, arguments("tp1", mtp_num_layers=0))
    return [name for name, _ in model.canonical_parameters() if name.startswith("mtp.")]


def test_prediction_layers_can_be_left_out(folder: Path) -> None:
    assert run_ranks(1, without, folder / "tp1-mca", folder) == [[]]
    assert run_ranks(1, without, folder / "with", folder) == [[]]
