"""Packed rows, smoothed labels and other losses train as the plain thing does."""

import logging
from collections.abc import Callable
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import run_in_turn, run_ranks
from loss_curves import worst
from memory import MIB, peak
from prediction import deepseek_with_prediction
from train_cases import (
    VOCAB,
    arguments,
    history,
    make_trainer,
    quietly,
    samples,
    tiny_checkpoint,
    train_losses,
)

pytestmark = pytest.mark.ranks

STEPS, SAMPLES = 3, 6
WHOLE = {"max_steps": STEPS, "train_sampling_strategy": "sequential", "count": SAMPLES}  # all in each step
PLAIN = WHOLE | {"gradient_accumulation_steps": SAMPLES}
PACKED = WHOLE | {"gradient_accumulation_steps": SAMPLES, "sequence_packing": True}
LAYOUTS = {
    "single": (1, {}),
    "micro-batch-2": (1, {"per_device_train_batch_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
}


@pytest.fixture(scope="module")
def unpacked_and_leaking(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    plain = partial(train_losses, checkpoint, folder / "plain", **PLAIN)
    return [
        losses for (losses,) in run_in_turn(1, plain, partial(leaking_losses, checkpoint, folder / "leak"))
    ]


@pytest.fixture(scope="module")
def unpacked(unpacked_and_leaking):
    return unpacked_and_leaking[0]


@pytest.mark.cases(0, always=["cp2"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_losses_equal_unpacked_ones(name, unpacked, checkpoint, tmp_path):
    size, changes = LAYOUTS[name]
    found = run_ranks(size, train_losses, checkpoint, tmp_path, **(PACKED | changes))[0]
    assert worst(unpacked["loss"], found["loss"]) < 1e-5
    assert worst(unpacked["grad_norm"], found["grad_norm"]) < 1e-4
    assert worst(unpacked["eval_loss"], found["eval_loss"]) < 1e-5


def leaking_losses(checkpoint: Path, output: Path) -> dict[str, list[float]]:
    """With a planted fault: attention is not reported where sequences end."""
    from mca_train.engine import engine

    engine._packed_params = lambda *_: None
    return train_losses(checkpoint, output, **PACKED)


def test_the_comparison_sees_sequences_that_leak(unpacked_and_leaking):
    unpacked, found = unpacked_and_leaking
    assert worst(unpacked["loss"], found["loss"]) > 1e-4


SMOOTHING = 0.15


def smoothed_by_torch(checkpoint: Path, output: Path) -> dict[str, list[float]]:
    """Losses of a trainer that takes the logits to `torch`'s smoothed cross entropy."""
    from mca_train import McaTrainer

    class OnLogits(McaTrainer):
        wants_logits = True

        def compute_loss(self, output: torch.Tensor, batch: Any, **_: Any) -> Any:
            labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
            logits = output[..., :VOCAB].float().flatten(0, 1)
            smoothing = torch.nn.functional.cross_entropy(
                logits, labels.flatten(), reduction="sum", label_smoothing=SMOOTHING
            )
            return smoothing, batch.loss_mask.sum().int()

    from mca_models import AutoModel

    args = arguments(output, max_steps=STEPS)
    model = AutoModel.from_pretrained(checkpoint, args)
    trainer = quietly(
        lambda: OnLogits(model=model, args=args, train_dataset=samples(22), eval_dataset=samples(7, seed=9))
    )
    quietly(trainer.train)
    quietly(trainer.evaluate)
    return {key: history(trainer, key) for key in ("loss", "grad_norm", "eval_loss")}


def test_smoothed_labels_equal_torchs_on_the_logits(checkpoint, tmp_path):
    theirs = run_ranks(1, smoothed_by_torch, checkpoint, tmp_path)[0]
    changes = {"tensor_model_parallel_size": 2, "label_smoothing_factor": SMOOTHING, "max_steps": STEPS}
    ours = run_ranks(2, train_losses, checkpoint, tmp_path, **changes)[0]
    for key in theirs:
        assert worst(theirs[key], ours[key]) < 1e-4, key


CHUNKED = {
    "single": (1, {"loss_chunk_size": 7}),
    "micro-batch-4": (
        1,
        {"loss_chunk_size": 10, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    ),
    "packed-cp2": (2, {"loss_chunk_size": 5, "sequence_packing": True, "context_parallel_size": 2}),
    "tp2-sp-pp2-overlap": (
        4,
        {
            "loss_chunk_size": 6,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "overlap_grad_reduce": True,
        },
    ),
}
TIED = WHOLE | {
    "max_steps": 2,
    "gradient_accumulation_steps": 4,
    "count": 4,
    "label_smoothing_factor": 0.1,
}


def chunked_losses(checkpoint: Path, output: Path, **changes: Any) -> dict[str, list[float]]:
    """Training losses, and on the rank with the loss the most tokens whose logits stood at once."""
    from torch.nn.modules.module import register_module_forward_hook

    rows = [0]

    def watch(module: torch.nn.Module, _: Any, output: Any) -> None:
        if type(module).__name__ == "ColumnParallelLinear" and output[0].shape[-1] in (131, 66):
            rows[0] = max(rows[0], output[0].shape[:2].numel())

    handle = register_module_forward_hook(watch)
    found = train_losses(checkpoint, output, **changes)
    handle.remove()
    return found | {"rows": [float(rows[0])]}


def test_losses_in_chunks_are_the_same(tmp_path, every_case):
    tied = tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True, vocab_size=131, num_hidden_layers=2)
    chosen = CHUNKED if every_case else {name: CHUNKED[name] for name in ("single", "packed-cp2")}
    runs = {"whole": (1, {}), **chosen}
    results = {}
    for number in sorted({size for size, _ in runs.values()}):
        some = {name: changes for name, (size, changes) in runs.items() if size == number}
        calls = [
            partial(chunked_losses, tied, tmp_path / name, **(TIED | changes))
            for name, changes in some.items()
        ]
        results |= dict(zip(some, run_in_turn(number, *calls), strict=True))
    (whole,) = results["whole"]
    assert whole["rows"][0] >= 32
    for name, (_, changes) in chosen.items():
        found = results[name]
        assert worst(whole["loss"], found[0]["loss"]) < 1e-5, name
        assert worst(whole["grad_norm"], found[0]["grad_norm"]) < 1e-4, name
        assert worst(whole["eval_loss"], found[0]["eval_loss"]) < 1e-5, name
        assert 0 < found[-1]["rows"][0] <= changes["loss_chunk_size"], name


def memory_of_a_step(checkpoint: Path, output: Path, **changes: Any) -> float:
    """MiB by which a step on 1024 tokens raises the memory of this process."""
    data = samples(1, longest=1025)
    data.tokens, data.offsets = data.tokens.repeat(1024 // len(data.tokens) + 1)[:1024], data.offsets * 0
    data.offsets[1], data.is_target = 1024, None
    trainer = make_trainer(checkpoint, output, train_dataset=data, max_steps=1, **changes)
    with peak() as most:
        quietly(trainer.train)
    return most[0] / MIB


def test_chunks_take_less_memory_than_whole_logits(tmp_path):
    sizes = {"vocab_size": 20000, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    large = tiny_checkpoint(tmp_path / "large", max_position_embeddings=1024, head_dim=8, **sizes)
    logits = 1024 * 20000 * 4 / 2**20
    (whole,) = run_ranks(1, memory_of_a_step, large, tmp_path / "whole")
    (chunked,) = run_ranks(1, memory_of_a_step, large, tmp_path / "chunked", loss_chunk_size=64)
    assert chunked < whole - 0.3 * logits, (whole, chunked, logits)  # resident memory: allocators keep some


def python_errors(checkpoint: Path, output: Path) -> list[str]:
    """Return the trainer's messages about arguments that Hugging Face's accepts, and about wrong ones."""
    from mca_models import AutoModel

    args = arguments(output)
    model = AutoModel.from_pretrained(checkpoint, args)
    good = {"model": model, "args": args, "train_dataset": samples(8)}
    return [*constructor_errors(checkpoint, output, good), *attribute_errors(good)]


def constructor_errors(checkpoint: Path, output: Path, good: dict[str, Any]) -> list[str]:
    """Return the messages about what a trainer is made of."""
    import transformers

    from mca_models import AutoModel
    from mca_train import McaTrainer

    class OnLogits(McaTrainer):
        wants_logits = True

    def with_args(**given: Any) -> dict[str, Any]:
        return good | {"args": arguments(output, **given)}

    changed = arguments(output)
    built_before = AutoModel.from_pretrained(checkpoint, changed)
    changed.hidden_dropout, changed.bf16 = 0.5, True
    theirs = transformers.TrainingArguments(output_dir=str(output), use_cpu=True)
    another = {
        **{"hidden_dropout": 0.5, "context_parallel_size": 2},
        **{"bf16": True, "gradient_checkpointing": True},
    }
    alike = {
        **{"hidden_dropout": 0.0, "expert_tensor_parallel_size": 1, "moe_z_loss_coeff": 0.1},
        **{"optimizer": "sgd", "calculate_per_token_loss": True},
    }
    quietly(lambda: McaTrainer(**with_args(**alike)))
    rounded = arguments(output, bf16=True)
    explicit = AutoModel.from_pretrained(checkpoint, rounded, dtype="float32")
    quietly(lambda: McaTrainer(**(good | {"args": rounded, "model": explicit})))
    return messages(
        lambda: McaTrainer(**with_args(**another)),
        lambda: McaTrainer(**(good | {"args": changed, "model": built_before})),
        lambda: McaTrainer(**(good | {"model": torch.nn.Linear(1, 1)})),
        lambda: McaTrainer(**(good | {"args": theirs})),
        lambda: McaTrainer(**with_args(lr_scheduler_type="warmup_stable_decay")),
        lambda: McaTrainer(**with_args(sequence_packing=True), data_collator=lambda rows: {}),
        lambda: OnLogits(**with_args(label_smoothing_factor=0.1)),
    )


def attribute_errors(good: dict[str, Any]) -> list[str]:
    """Return the messages of methods, and about attributes that are set after construction."""
    import transformers

    from mca_train import McaTrainer

    class OneNumber(McaTrainer):
        def compute_loss(self, output: torch.Tensor, batch: Any, **_: Any) -> Any:
            return output.mean()

    shown: list[object] = []

    class Begin(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
            shown.append(train_dataloader)

    def collated(rows: Any) -> dict[str, Any]:
        return {"input_ids": [[1]]}

    def set_since(**values: Any) -> Any:
        trainer = McaTrainer(**good)
        vars(trainer).update(values)
        return trainer

    failing = quietly(lambda: OneNumber(**good, eval_dataset={"some": samples(2)}))
    attributes = {
        **{"compute_metrics": print, "compute_loss_func": print, "data_collator": collated},
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]),
        "lr_scheduler": object(),
    }
    trained = McaTrainer(**good)
    quietly(trained.train)
    trained.optimizer = None  # to free memory
    quietly(lambda: trained.evaluate(samples(2)))
    signals = failing.metrics
    reported = messages(
        lambda: McaTrainer(**good).predict(samples(2)),
        lambda: OneNumber(**good).train(),
        lambda: McaTrainer(**(good | {"train_dataset": [{"text": "a"}] * 8})).train(),
        lambda: McaTrainer(**good, data_collator=collated, callbacks=[Begin()]).train(),
        lambda: failing.evaluate(samples(2)),
        lambda: failing.evaluate("other"),
        *[set_since(**{name: value}).train for name, value in attributes.items()],
        lambda: set_since(compute_metrics=print).evaluate(samples(2)),
        McaTrainer(**good).create_optimizer,
        lambda: McaTrainer(**good).create_optimizer_and_scheduler(3),
    )
    assert [type(loader).__name__ for loader in shown] == ["DataLoader"]
    assert failing.metrics is signals  # training's go on after an evaluation that failed
    return reported


def messages(*calls: Callable[[], object]) -> list[str]:
    """Return the message of the error of each of ``calls``."""
    from mca_config.errors import McaError

    reported = []
    for call in calls:
        with pytest.raises(McaError) as error:
            quietly(call)
        reported.append(str(error.value))
    return reported


def test_what_python_gives_wrongly_is_one_line(checkpoint, tmp_path):
    (reported,) = run_ranks(1, python_errors, checkpoint, tmp_path)
    expected = [
        "args differ from those that the model was built with: context_parallel_size 2 (the model has 1), bf16 True "
        "(the model has float32), hidden_dropout 0.5 (the model has 0.0), recompute_granularity full (the model has No",
        "bf16 True (the model has float32), hidden_dropout 0.5 (the model has 0.0); pass the same args",
        "model is a Linear; expected what mca_models.AutoModel.from_pretrained returns",
        "expected mca_config.TrainingArguments",
        "warmup_stable_decay with lr_scheduler_kwargs {}: ",
        "sequence_packing is not supported with data_collator",
        "label_smoothing_factor is not supported with wants_logits; remove it",
        "McaTrainer.predict is not supported; use evaluate",
        "OneNumber.compute_loss returned tensor(",
        "a sample of the dataset has text; expected 'input_ids'",
        "data_collator made no tensor 'input_ids'",
        "OneNumber.compute_loss returned tensor(",
        "eval_dataset has no dataset 'other'; it has: some",
        "compute_metrics was set on the trainer, which has no effect (evaluation computes the loss only; ov",
        "compute_loss_func was set on the trainer, which has no effect (override compute_loss); remove it",
        "data_collator made no tensor 'input_ids'",
        *[
            "optimizer or lr_scheduler was set on the trainer, which has no effect (the optimizer is Megatron's"
        ]
        * 2,
        "compute_metrics was set on the trainer",
        *["McaTrainer.create_optimizer is not supported; the optimizer is Megatron's: set optimizer"] * 2,
    ]
    for message, part in zip(reported, expected, strict=True):
        assert part in message, message
        assert "\n" not in message


def fused_gradients(dtype: torch.dtype) -> float:
    """The largest error of this rank's gradients from Megatron's fused cross entropy, and torch's largest."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    from mca_config.layout import ParallelLayout
    from mca_models.megatron.distributed import parallel

    place = parallel.start(ParallelLayout(tensor_model_parallel_size=2))
    draw = torch.Generator().manual_seed(4)
    logits = torch.randn(5, 3, 16, generator=draw).to(dtype).requires_grad_()
    labels = torch.randint(0, 16, (5, 3), generator=draw)
    torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="sum"
    ).backward()
    mine = logits.detach().chunk(2, -1)[place.coordinates.tp].clone().requires_grad_()
    fused_vocab_parallel_cross_entropy(mine, labels, parallel.tensor_group()).sum().backward()
    assert mine.grad is not None and mine.grad.dtype == dtype and logits.grad is not None
    expected = logits.grad.chunk(2, -1)[place.coordinates.tp]
    return float((mine.grad - expected).abs().max() / expected.abs().max())


def test_the_fused_cross_entropy_has_the_gradients_of_its_dtype():
    allowed = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    found = run_in_turn(2, *(partial(fused_gradients, dtype) for dtype in allowed))
    for (dtype, error), ranks in zip(allowed.items(), found, strict=True):
        assert max(ranks) < error, dtype


def sequences(count: int, *, targets: bool = True) -> list[Any]:
    draw = np.random.default_rng(count)
    lengths = draw.integers(8, 20, count)
    return [(draw.integers(1, 60, length), np.full(length, targets)) for length in lengths]


def with_an_empty_step(
    checkpoint: Path, output: Path, steps: list[Any], **changes: Any
) -> tuple[Any, list[str]]:
    """A trainer that has taken ``steps``, each of two samples, and what it has warned of."""
    from mca_config.errors import McaError
    from mca_train import TokenDataset

    run = {"lr_scheduler_type": "constant", "warmup_steps": 0, "train_sampling_strategy": "sequential"}
    data = TokenDataset.from_samples([sample for step in steps for sample in step])
    trainer = make_trainer(checkpoint, output, train_dataset=data, max_steps=len(steps), **run | changes)
    handler = BufferingHandler(1000)
    logging.getLogger("mca_train.trainer.monitor").addHandler(handler)
    logging.disable(logging.NOTSET)
    try:
        quietly(trainer.train)
        reported = []
    except McaError as error:
        reported = [str(error)]
    finally:
        logging.disable(logging.WARNING)
        logging.getLogger("mca_train.trainer.monitor").removeHandler(handler)
    return trainer, [record.getMessage() for record in handler.buffer] + reported


def steps_without_targets(cases: list[tuple[Path, dict[str, Any]]], output: Path) -> list[dict[str, Any]]:
    found = []
    empty, (first, last) = sequences(2, targets=False), (sequences(2), sequences(4)[2:])
    for checkpoint, changes in cases:
        plain, silent = with_an_empty_step(checkpoint, output, [first, last], **changes)
        trainer, reported = with_an_empty_step(checkpoint, output, [first, empty, last], **changes)
        before, after = (dict(made.model.export_weights()) for made in (plain, trainer))
        keys = ("loss", "grad_norm", "train_loss")
        found.append(
            {
                "moved": [name for name in before if not torch.equal(before[name], after[name])],
                "other": [key for key in keys if history(plain, key) != history(trainer, key)],
                "skipped": history(trainer, "skipped_steps"),
                "reported": (silent, reported),
            }
        )
    return found


def test_a_step_without_a_target_moves_nothing(checkpoint, tmp_path):
    biased = deepseek_with_prediction().save(tmp_path / "biased")
    split = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    staged = {"pipeline_model_parallel_size": 2, "moe_router_bias_update_rate": 0.1}
    cases = [
        (checkpoint, split | {"gradient_accumulation_steps": 1}),
        (biased, staged | {"gradient_accumulation_steps": 2}),
    ]
    for of_rank in run_ranks(2, steps_without_targets, cases, tmp_path / "run"):
        for found in of_rank:
            assert found["moved"] == found["other"] == []
            assert found["skipped"] == [1]
            silent, (first, last) = found["reported"]
            assert silent == []
            assert first.startswith("step 2 was skipped: its loss has 0 targets (all labels are -100")
            assert last == "1 of 3 steps of the run were skipped: their losses have 0 targets"


def without_any_target(checkpoint: Path, output: Path) -> list[tuple[list[str], dict[str, float]]]:
    """Return the messages of a run without targets, with the token loss and with another, and its last log."""
    from mca_train import McaTrainer

    class Other(McaTrainer):
        def compute_loss(self, output: torch.Tensor, batch: Any, **_: Any) -> Any:
            return (output * batch.loss_mask).sum(), batch.loss_mask.sum()

    found = []
    for kind in (McaTrainer, Other):
        steps = [sequences(2, targets=False)] * 2
        changes = {"kind": kind, "gradient_accumulation_steps": 2}
        trainer, reported = with_an_empty_step(checkpoint, output, steps, **changes)
        found.append((reported, trainer.state.log_history[-1]))
    return found


def test_a_run_without_any_target_fails_unless_its_loss_counts_something_else(checkpoint, tmp_path):
    (((failed, _), (reported, log)),) = run_ranks(1, without_any_target, checkpoint, tmp_path)
    assert failed[-1].startswith("all 2 steps of the run were skipped, no token of their samples is a target")
    assert reported[1:] == ["2 of 2 steps of the run were skipped: their losses have 0 targets"]
    assert "train_runtime" in log and "train_loss" not in log
