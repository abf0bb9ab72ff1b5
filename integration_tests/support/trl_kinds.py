"""Arguments of TRL's trainers and of ``mca-train`` for the same training."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl_formulas
import trl_grpo
from train_cases import history, quietly

STEPS, BETA, ALPHA, SMOOTHING = 6, 0.3, 0.4, 0.1
PAIRS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""What both log of preference pairs."""
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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One training, reported to both.

    Args:
        task: Of ``mca-train``.
        trainer: Name of TRL's trainer, before ``Trainer`` and ``Config``.
        values: The keys of ours.
        settings: Those of TRL's configuration.
        both: Keys of both.
        rows: The file.
        metrics: What both log beside loss and norm.
        model: The directory it begins with.
    """

    task: str
    trainer: str
    rows: str
    values: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    model: str = "model"


PLAIN = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
"""Losses of pairs that need nothing but ``beta``."""


def _pairs(loss: str, *, trainer: str = "DPO", both: dict[str, Any] | None = None, **settings: Any) -> Kind:
    values = {"dpo_loss": loss, "dpo_beta": BETA}
    settings = {"loss_type": [loss], "beta": BETA} | settings
    return Kind(
        task="dpo",
        trainer=trainer,
        rows="dpo",
        values=values,
        settings=settings,
        both=both or {},
        metrics=PAIRS,
    )


def _and(kind: Kind, **values: Any) -> Kind:
    return Kind(**(vars(kind) | {"values": kind.values | values}))


def _classified(problem: str, column: str, values: dict[str, Any], model: str) -> Kind:
    return Kind(
        task="classify",
        trainer="",
        rows="classify",
        values={"problem_type": problem, "label_column": column} | values,
        settings=AT_ONCE,
        model=model,
    )


SLOWLY = {"discopop": {"learning_rate": 2e-4}}
"""Its gate has a temperature of 0.05: a last bit of a log-probability is 20 there, and ten times that a step on."""

LABELS = ["bad", "fair", "good"]
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
"""TRL takes the mean of this cross entropy over the tokens of a micro-batch, which is to be one pair then."""

AT_ONCE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
"""Of means over micro-batches TRL logs the mean, which is that of all tokens if there is one."""

KINDS = {
    "sft": Kind(task="sft", trainer="SFT", rows="sft"),
    "sigmoid": _pairs("sigmoid"),
    "hinge": _pairs("hinge"),
    "ipo": _pairs("ipo"),
    "sigmoid_norm": _pairs("sigmoid_norm"),
    "simpo": _and(
        _pairs("simpo", trainer="CPO", loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.7), simpo_gamma=0.7
    ),
    "rpo": _and(
        _pairs("sigmoid", both=ONE_BY_ONE, loss_type=["sigmoid", "sft"], loss_weights=[1.0, ALPHA]),
        rpo_alpha=ALPHA,
    ),
    "robust": _and(_pairs("robust", label_smoothing=SMOOTHING), dpo_label_smoothing=SMOOTHING),
    "exo_pair": _and(_pairs("exo_pair", label_smoothing=SMOOTHING), dpo_label_smoothing=SMOOTHING),
    **{name: _pairs(name, both=SLOWLY.get(name)) for name in PLAIN},
    "kto": Kind(
        task="kto",
        trainer="KTO",
        rows="kto",
        values={"kto_beta": BETA},
        settings={"beta": BETA} | AT_ONCE,
        both={"desirable_weight": 1.5},
        metrics=("kl", *(name for name in PAIRS if name != "rewards/accuracies")),
    ),
    "reward": Kind(
        task="reward",
        trainer="Reward",
        rows="reward",
        settings=AT_ONCE,
        both={"center_rewards_coefficient": 0.2},
        metrics=("accuracy", "margin", "mean_reward", "min_reward", "max_reward"),
        model="score",
    ),
    "classes": _classified("single_label_classification", "label", {"labels": LABELS}, "scores"),
    "several": _classified("multi_label_classification", "tags", {"labels": LABELS}, "scores"),
    "number": _classified("regression", "number", {}, "score"),
    **{
        f"grpo-{loss}": Kind(
            task="grpo",
            trainer="GRPO",
            rows="",
            values={"loss": loss},
            settings=AT_ONCE,
            metrics=trl_grpo.METRICS,
        )
        for loss in ("grpo", "dapo")
    },
    "precomputed": _and(_pairs("ipo", precompute_ref_log_probs=True), precompute_ref_log_probs=True),
}


@dataclass(frozen=True)
class Theirs:
    """Results of TRL.

    Args:
        logged: By its trainers, of each kind.
        formulas: Of the losses of pairs.
    """

    logged: dict[str, Logged]
    formulas: trl_formulas.Found


def with_trl(folder: Path, kinds: list[str]) -> Theirs:
    """All that is asked of TRL."""
    import datasets

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    datasets.disable_progress_bars()
    pairs = quietly(lambda: trl_trainer(folder, KINDS["sigmoid"], "sigmoid"))
    formulas = quietly(lambda: trl_formulas.by_trl(pairs))
    return Theirs({kind: quietly(lambda kind=kind: trl_trained(folder, kind)) for kind in kinds}, formulas)


def trl_trained(folder: Path, name: str) -> Logged:
    kind = KINDS[name]
    if kind.task == "classify":
        return classified(folder, kind, name)
    if kind.task == "grpo":
        return trl_grpo.by_trl(folder, RUN | kind.settings, kind.values["loss"])
    trainer = trl_trainer(folder, kind, name)
    trainer.train()
    return {key: history(trainer, key) for key in ("loss", "grad_norm", *kind.metrics)}


def trl_trainer(folder: Path, kind: Kind, name: str) -> Any:
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental import cpo

    library = cpo if kind.trainer == "CPO" else trl
    rows = datasets.Dataset.from_json(str(folder / f"{kind.rows}.jsonl"), cache_dir=str(folder / "cache"))
    common = RUN | kind.both | kind.settings | {"output_dir": str(folder / f"trl-{name}"), "max_length": 512}
    common |= {"bf16": False, "gradient_checkpointing": False}  # on, unless said
    return getattr(library, f"{kind.trainer}Trainer")(
        args=getattr(library, f"{kind.trainer}Config")(**common),
        model=(
            AutoModelForCausalLM if kind.model == "model" else AutoModelForSequenceClassification
        ).from_pretrained(folder / kind.model, dtype="float32"),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )


def classified(folder: Path, kind: Kind, name: str) -> Logged:
    """Return the logs of transformers' own Trainer."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    problem, column = kind.values["problem_type"], kind.values["label_column"]
    made: dict[str, Any] = {
        "single_label_classification": LABELS.index,
        "multi_label_classification": lambda tags: [float(label in tags) for label in LABELS],
        "regression": float,
    }
    rows = [json.loads(line) for line in (folder / "classify.jsonl").read_text().splitlines()]
    samples = [{**tokenizer(row["text"]), "label": made[problem](row[column])} for row in rows]
    model = AutoModelForSequenceClassification.from_pretrained(folder / kind.model, dtype=torch.float32)
    model.config.problem_type = problem
    args = TrainingArguments(**(RUN | kind.settings | {"output_dir": str(folder / f"hf-{name}")}))
    trainer = Trainer(model, args, DataCollatorWithPadding(tokenizer), samples)
    trainer.train()
    return {key: history(trainer, key) for key in ("loss", "grad_norm")}


def mca_trained(folder: Path, name: str, layout: str, sizes: dict[str, Any]) -> Logged:
    """Return the logs of ``mca-train``. Runs on every rank."""
    kind = KINDS[name]
    if kind.task == "grpo":
        run = RUN | {key: value for key, value in sizes.items() if key != "replicas"}
        run["gradient_accumulation_steps"] //= sizes.get("replicas", 1)
        return trl_grpo.by_mca(folder, folder / f"{name}-{layout}", run, kind.values["loss"])
    trainer = mca_trainer(folder, name, layout, sizes)
    trainer.train()
    return {key: history(trainer, key) for key in ("loss", "grad_norm", *KINDS[name].metrics)}


def mca_trainer(folder: Path, name: str, layout: str, sizes: dict[str, Any]) -> Any:
    """The trainer that ``mca-train`` makes on this rank."""
    import logging

    from mca_train.checkpoint.output_lock import OutputLock
    from mca_train.config.model import launcher_world_size
    from mca_train.run.inputs import read_inputs
    from mca_train.run.rules import check
    from mca_train.run.settings import make_settings
    from mca_train.run.train import make_trainer
    from mca_train.tasks import TASKS

    logging.disable(logging.WARNING)
    kind = KINDS[name]
    values = (
        RUN
        | kind.both
        | {
            "model_name_or_path": str(folder / kind.model),
            "tokenizer_name_or_path": str(folder / "model"),
            "train_file": str(folder / f"{kind.rows}.jsonl"),
            "output_dir": str(folder / f"{name}-{layout}"),
            "seq_length": 512,
        }
    )
    values |= kind.values | sizes
    values["gradient_accumulation_steps"] //= values.pop("replicas", 1)
    task = TASKS[kind.task]
    run = check(task, make_settings(task, values, "test"), launcher_world_size).require()
    return make_trainer(read_inputs(run, OutputLock(Path(run.settings.training.output_dir))))
