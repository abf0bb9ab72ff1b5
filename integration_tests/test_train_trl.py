"""TRL is the referee: ``sft`` and ``dpo`` log its losses and gradient norms, step by step, from the same files."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness import prepare_parent, run_ranks
from layouts import EVERY
from loss_curves import SMALL
from train_cases import history, quietly, tiny_checkpoint

pytestmark = pytest.mark.ranks

STEPS, ROWS, BETA = 8, 24, 0.3
LOSS, NORM = 1e-5, 1e-4
"""Relative: fp32 sums in another order, which Adam does not enlarge where it divides by no less than `adam_epsilon`."""
MARGIN = 4e-5
"""Of preferences, absolute: they compare log-probabilities of some -200, whose last bit is 1.5e-5."""
KINDS = ("sft", "sigmoid", "hinge", "ipo")
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "tp2-pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "cp2-dp2": {"context_parallel_size": 2, "gradient_accumulation_steps": 1},
}
TRAINED = {
    "single": KINDS,
    "tp2-pp2": KINDS[:2] if EVERY else KINDS[:1],
    "cp2-dp2": KINDS[: 2 if EVERY else 1],
}
RUN: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 3,
}
Logged = dict[str, list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and files of both kinds: ragged, some longer than what is kept of them."""
    from tokenizers_for_tests import byte_tokenizer

    folder = tmp_path_factory.mktemp("trl")
    tiny_checkpoint(folder / "model", vocab_size=264, **SMALL)
    byte_tokenizer().save_pretrained(folder / "model")
    prepare_parent()
    import mca_train.trainer.dpo  # noqa: F401  (once, for all ranks)

    words = Path(json.__file__).read_text().split()
    pieces = [" ".join(words[start : start + 3 + start % 5]) for start in range(0, 4 * ROWS)]
    prompts, chosen, rejected = pieces[:ROWS], pieces[ROWS : 2 * ROWS], pieces[2 * ROWS : 3 * ROWS]
    write(folder / "sft.jsonl", {"prompt": prompts, "completion": chosen})
    write(folder / "dpo.jsonl", {"prompt": prompts, "chosen": chosen, "rejected": rejected})
    return folder


def write(path: Path, columns: dict[str, list[str]]) -> None:
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_trl(folder: Path) -> dict[str, Logged]:
    """What TRL's trainers log, of each kind."""
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def trained(kind: str) -> Logged:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
        name = "sft" if kind == "sft" else "dpo"
        rows = datasets.Dataset.from_json(str(folder / f"{name}.jsonl"), cache_dir=str(folder / "cache"))
        common = RUN | {"output_dir": str(folder / f"trl-{kind}"), "max_length": 512}
        common |= {"bf16": False, "gradient_checkpointing": False}  # on, unless said
        given = {"model": model, "train_dataset": rows, "processing_class": tokenizer}
        if kind == "sft":
            trainer = trl.SFTTrainer(args=trl.SFTConfig(**common), **given)
        else:
            trainer = trl.DPOTrainer(args=trl.DPOConfig(loss_type=[kind], beta=BETA, **common), **given)
        trainer.train()
        return {key: history(trainer, key) for key in ("loss", "grad_norm")}

    return {kind: quietly(lambda kind=kind: trained(kind)) for kind in KINDS}


def with_mca(folder: Path, layouts: list[str]) -> dict[tuple[str, str], Logged]:
    """What ``mca-train`` logs, of each kind on each layout. Runs on every rank."""
    found = {}
    for layout in layouts:
        for kind in TRAINED[layout]:
            found[kind, layout] = quietly(lambda kind=kind, layout=layout: mca_trained(folder, kind, layout))
    return found


def mca_trained(folder: Path, kind: str, layout: str) -> Logged:
    import logging

    from mca_train.checkpoint.output_lock import OutputLock
    from mca_train.config.model import given_ranks
    from mca_train.run.build import make_trainer
    from mca_train.run.checks import check, settings_of
    from mca_train.run.inputs import read_inputs
    from mca_train.tasks.table import TASKS

    logging.disable(logging.WARNING)
    name = "sft" if kind == "sft" else "dpo"
    values = RUN | {
        "model_name_or_path": str(folder / "model"),
        "train_file": str(folder / f"{name}.jsonl"),
        "output_dir": str(folder / f"{kind}-{layout}"),
        "seq_length": 512,
    }
    values |= LAYOUTS[layout] | ({} if kind == "sft" else {"dpo_loss": kind, "dpo_beta": BETA})
    run = check(TASKS[name], settings_of(TASKS[name], values, "test"), given_ranks).require()
    trainer = make_trainer(read_inputs(run, OutputLock(Path(run.settings.training.output_dir))))
    trainer.train()
    return {key: history(trainer, key) for key in ("loss", "grad_norm")}


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Logged]:
    return run_ranks(1, with_trl, folder, process_group=False, timeout=300)[0]


@pytest.fixture(scope="module")
def ours(folder: Path) -> Any:
    """By layout; those of one number of ranks are run together."""

    @cache
    def of_size(size: int) -> dict[tuple[str, str], Logged]:
        layouts = [name for name in LAYOUTS if (name == "single") == (size == 1)]
        return run_ranks(size, with_mca, folder, layouts, timeout=300)[0]

    return lambda kind, layout: of_size(1 if layout == "single" else 4)[kind, layout]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for layout, kinds in TRAINED.items() for kind in kinds],
)
def test_every_step_is_that_of_trl(kind: str, layout: str, theirs: dict[str, Logged], ours: Any) -> None:
    right, found = theirs[kind], ours(kind, layout)
    assert len(right["loss"]) == STEPS
    assert right["loss"][-1] != pytest.approx(right["loss"][0], rel=0.02)  # it learns
    assert found["loss"] == pytest.approx(right["loss"], rel=LOSS, abs=0.0 if kind == "sft" else MARGIN)
    assert found["grad_norm"] == pytest.approx(right["grad_norm"], rel=NORM)
