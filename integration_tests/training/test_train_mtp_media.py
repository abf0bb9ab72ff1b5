"""MTP layers on rows with pictures: the losses, and one step of every parameter, are those of plain PyTorch.

transformers has no MTP layers: the reference is one of its decoder layers, on the embeddings with image features that
its model computes, shifted by one token. `--cases all` trains on all layouts.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from crossed_runs import Prepared, prepared
from mca_models.megatron.features import media, mtp
from media_runs import Row, load_model, run_training
from prediction import APART, SCALE, PredictionLayer

pytestmark = pytest.mark.ranks

RATE = 0.5
PIPELINE = ("--pipeline_model_parallel_size", "2")
TENSOR = ("--tensor_model_parallel_size", "2")
RECOMPUTE = (
    *("--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", "1"),
)
PACKED = (
    *("--sequence_packing", "true", "--seq_length", "512"),
    *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1"),
)
LAYOUTS: dict[str, Sequence[str]] = {
    "one": (),
    "recompute": RECOMPUTE,
    "tp2": TENSOR,
    "tp2sp": (*TENSOR, "--sequence_parallel"),
    "cp2": ("--context_parallel_size", "2"),
    "cp2packed": ("--context_parallel_size", "2", *PACKED, *RECOMPUTE),
    "pp2": PIPELINE,
    "pp2vpp2": (*PIPELINE, "--virtual_pipeline_model_parallel_size", "2"),
    "pp2single": (
        *PIPELINE,
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4"),
        *RECOMPUTE,
    ),
    "tp2pp2sp": (*PIPELINE, *TENSOR, "--sequence_parallel"),
    "pp2cp2packed": (*PIPELINE, "--context_parallel_size", "2", *PACKED),
    "dp2": ("--nproc_per_node", "2", "--gradient_accumulation_steps", "1"),
    "pp2dp2": (*PIPELINE, "--nproc_per_node", "4", "--gradient_accumulation_steps", "1"),
}


class Predicting:
    """transformers' model and an MTP layer on its hidden states and shifted embeddings."""

    def __init__(self, main: Any) -> None:
        self.main = main
        text = SimpleNamespace(config=main.config.text_config, model=main.model.language_model)
        self.layer = PredictionLayer(text, torch.Generator().manual_seed(3))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the layer's tensors by their names in checkpoints."""
        own = {f"{APART[name]}.weight": tensor for name, tensor in self.layer.own().items()}
        prefix = APART["inside"].format(layer=0)
        return own | {
            prefix + name: tensor for name, tensor in self.layer.layer.state_dict(keep_vars=True).items()
        }

    def losses(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed losses of the next token and of the one after it."""
        inner, kept = self.main.model.language_model, dict[str, Any]()
        hooks = [
            inner.register_forward_pre_hook(
                lambda module, args, kwargs: kept.update(embeddings=kwargs["inputs_embeds"]), with_kwargs=True
            ),
            inner.rotary_emb.register_forward_hook(lambda module, args, out: kept.update(rotary=out)),
            inner.norm.register_forward_hook(lambda module, args, out: kept.update(hidden=out)),
        ]
        logits = self.main(**{k: v for k, v in row.items() if k != "labels"}).logits
        for hook in hooks:
            hook.remove()
        following = kept["embeddings"].roll(-1, 1)
        predicted = self.main.lm_head(self.layer(kept["hidden"], following, kept["rotary"]))
        labels = row["labels"][0]
        found = [
            cross_entropy(values[0, :-depth], labels[depth:], reduction="sum")
            for depth, values in enumerate((logits, predicted), 1)
        ]
        return found[0], found[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Return a checkpoint with an MTP layer, and rows."""
    found = prepared("qwen3_5", tmp_path_factory.mktemp("mtp"))
    file = found.folder / "model" / "model.safetensors"
    own = {name: x.detach() for name, x in predicting(found).tensors().items()}
    save_file(load_file(file) | own, file, metadata={"format": "pt"})
    return found


def predicting(made: Prepared) -> Predicting:
    """Return the reference before training."""
    return Predicting(load_model(made.folder / "model"))


@pytest.fixture(scope="module")
def expected(made: Prepared) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the two losses, and the change of each tensor by a clipped step of SGD."""
    model, rows = predicting(made), made.rows()
    sums = [model.losses(row) for row in rows]
    targets = [sum(int((row["labels"][0, depth:] != -100).sum()) for row in rows) for depth in (1, 2)]
    means = [
        torch.stack(each).sum() / count for each, count in zip(zip(*sums, strict=True), targets, strict=True)
    ]
    (means[0] + SCALE * means[1]).backward()
    named = dict(model.main.named_parameters()) | {
        name: x for name, x in model.tensors().items() if x.requires_grad
    }
    torch.nn.utils.clip_grad_norm_(list(named.values()), 1.0)
    assert all(x.grad is not None for x in named.values())
    return [float(each.detach()) for each in means], {name: -RATE * x.grad for name, x in named.items()}


def train(made: Prepared, name: str, words: Sequence[str], *more: str) -> list[dict[str, float]]:
    """Train with plain steps of SGD; return the log."""
    optimizer = ("--optimizer", "sgd", "--learning_rate", str(RATE), "--mtp_loss_scaling_factor", str(SCALE))
    return run_training(made.folder, name, *optimizer, *words, *more)


def worst_error(made: Prepared, name: str, changes: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest error of a tensor's change, relative to its largest change, and the tensor."""
    before, after = (tensors(made.folder / folder) for folder in ("model", f"{name}/hf"))
    assert before.keys() == after.keys()
    largest = max(float(change.abs().max()) for change in changes.values())
    errors = {
        name: float((after[name] - before[name] - change).abs().max())
        / max(float(change.abs().max()), 1e-2 * largest)
        for name, change in changes.items()
    }
    return max((error, name) for name, error in errors.items())


@pytest.mark.cases(0, always=["pp2vpp2", "cp2packed", "tp2sp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_with_pictures_and_mtp_layers_is_exact(
    layout: str, made: Prepared, expected: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses, changes = expected
    (log,) = train(made, layout, LAYOUTS[layout], "--max_steps", "1")
    assert [log["loss"], log["mtp_1_loss"]] == pytest.approx(losses, rel=1e-5)
    worst = worst_error(made, layout, changes)
    assert worst[0] < 1e-3, worst  # weights near 1 keep a change of 1e-3 to 1e-4 of itself in fp32


def _words_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(media, "shifted_rows", lambda rows, count, packed: [torch.full_like(rows, -1)] * count)


def _unshifted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(media, "shifted_rows", lambda rows, count, packed: [rows] * count)


def _without_gradients(patch: pytest.MonkeyPatch) -> None:
    add = mtp.SentFeatures.add
    patch.setattr(mtp.SentFeatures, "add", lambda sent, found: add(sent, tuple(x.detach() for x in found)))


FAULTS = {
    "embeddings of placeholders": (_words_alone, "one"),
    "features of the same token": (_unshifted, "one"),
    "no gradients of features": (_without_gradients, "pp2"),
}


@pytest.mark.qualify
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_visible(
    fault: str,
    made: Prepared,
    expected: tuple[list[float], dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant, layout = FAULTS[fault]
    plant(monkeypatch)
    name = fault.replace(" ", "-")
    train(made, name, LAYOUTS[layout], "--max_steps", "1")
    assert worst_error(made, name, expected[1])[0] > 1e-2


WAYS = {
    "adapter": ("--lora_rank", "4", "--freeze", "[]"),
    "speaking": ("--freeze", "[vision, projector]"),
    "seeing": ("--freeze", "[language]"),
}


@pytest.mark.qualify
@pytest.mark.parametrize("way", WAYS)
def test_adapters_and_frozen_parts_train_on_stages_as_on_one(way: str, made: Prepared) -> None:
    """Features are sent whether they need gradients or not, and in evaluation."""
    evaluated = (
        "--eval_file",
        str(made.folder / "sft.jsonl"),
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "1",
    )
    steps = ("--max_steps", "2", *WAYS[way], *evaluated)
    layouts = {"one": (), "pp2": (*PIPELINE, *RECOMPUTE), "tp2pp2sp": LAYOUTS["tp2pp2sp"]}
    found = {}
    for layout, words in layouts.items():
        logs = train(made, f"{way}-{layout}", words, *steps)
        found[layout] = [log[name] for log in logs for name in ("loss", "mtp_1_loss")]
    assert len(found["one"]) == 4 and found["one"][1] != pytest.approx(found["one"][3], rel=1e-4)
    assert found["pp2"] == pytest.approx(found["one"], rel=1e-5)
    assert found["tp2pp2sp"] == pytest.approx(found["one"], rel=1e-5)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")
