"""``mca-train`` logs the losses, gradient norms and metrics of TRL, step by step, from the same files."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import trl_formulas
from cases import needed
from harness import prepare_parent, run_ranks
from loss_curves import SMALL
from train_cases import history, quietly, tiny_checkpoint
from trl_kinds import KINDS, LABELS, STEPS, Logged, Theirs, mca_trained, mca_trainer, with_trl

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

ROWS = 20  # five steps: the sixth begins another epoch
LOSS, NORM = 1e-5, 1e-4
"""Relative: fp32 sums in another order, which Adam does not enlarge where it divides by no less than `adam_epsilon`."""
MARGIN = 4e-5
"""Of preferences, absolute: they compare log-probabilities of some -200, whose last bit is 1.5e-5."""
ROUGH, ROUGHNESS = ("sppo_hard", "discopop"), 10
"""Losses that enlarge a last bit: a square of such sums, and one whose gate opens with them; norms of up to 1,200.
Their tolerances are that many times the others'. TRL's own steps in fp32 and in fp64 differ by 3e-5."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "tp2-pp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
    },
    "cp2-dp2": {"context_parallel_size": 2, "replicas": 2},
}
KEPT = ("precomputed", "single")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and files of each kind: ragged, some longer than what is kept of them."""
    from tokenizers_for_tests import byte_tokenizer
    from transformers import Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("trl")
    tokenizer = byte_tokenizer()
    tiny_checkpoint(folder / "model", vocab_size=264, **SMALL)
    tokenizer.save_pretrained(folder / "model")
    scored = SMALL | {"vocab_size": 264, "pad_token_id": tokenizer.pad_token_id}
    tiny_checkpoint(folder / "score", None, Qwen3ForSequenceClassification, num_labels=1, **scored)
    tiny_checkpoint(folder / "scores", None, Qwen3ForSequenceClassification, num_labels=3, **scored)
    prepare_parent()
    import mca_train.trainer.dpo
    import mca_train.trainer.kto
    import mca_train.trainer.scores  # noqa: F401  (once, for all ranks)

    words = Path(json.__file__).read_text().split()
    pieces = [" ".join(words[start : start + 3 + start % 5]) for start in range(0, 4 * ROWS)]
    prompts, chosen, rejected = pieces[:ROWS], pieces[ROWS : 2 * ROWS], pieces[2 * ROWS : 3 * ROWS]
    write(folder / "sft.jsonl", {"prompt": prompts, "completion": chosen})
    write(folder / "dpo.jsonl", {"prompt": prompts, "chosen": chosen, "rejected": rejected})
    better = [round(number % 5 / 3, 2) for number in range(ROWS)]
    write(
        folder / "reward.jsonl", {"prompt": prompts, "chosen": chosen, "rejected": rejected, "margin": better}
    )
    write(
        folder / "kto.jsonl",
        {"prompt": prompts, "completion": chosen, "label": [number % 4 != 2 for number in range(ROWS)]},
    )
    tags = [[label for place, label in enumerate(LABELS) if number >> place & 1] for number in range(ROWS)]
    labels = {"label": [LABELS[number % 3] for number in range(ROWS)], "tags": tags, "number": better}
    write(folder / "classify.jsonl", {"text": chosen, **labels})
    return folder


def write(path: Path, columns: dict[str, list[Any]]) -> None:
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_mca(folder: Path, grid: list[tuple[str, str]]) -> dict[tuple[str, str], Logged]:
    """Return the logs of ``mca-train``, of each kind and layout. Runs on every rank."""
    return {
        (kind, layout): quietly(
            lambda kind=kind, layout=layout: mca_trained(folder, kind, layout, LAYOUTS[layout])
        )
        for kind, layout in grid
    }


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest, folder: Path) -> Theirs:
    kinds = sorted(set(needed(request, "kind")))
    return run_ranks(1, with_trl, folder, kinds, process_group=False, timeout=300)[0]


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest, folder: Path) -> Any:
    """By layout; those of one number of ranks are run together."""
    grid = dict.fromkeys([*needed(request, "kind", "layout"), KEPT])

    @cache
    def of_size(size: int) -> dict[tuple[str, str], Logged]:
        some = [pair for pair in grid if (pair[1] == "single") == (size == 1)]
        return run_ranks(size, with_mca, folder, some, timeout=300)[0]

    return lambda kind, layout: of_size(1 if layout == "single" else 4)[kind, layout]


@pytest.mark.cases(0, always=["sigmoid-single", "precomputed-single", "reward-single", "grpo-dapo-cp2-dp2"])
@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for layout in LAYOUTS for kind in KINDS])
def test_every_step_is_that_of_trl(kind: str, layout: str, theirs: Theirs, ours: Any) -> None:
    right, found = theirs.logged[kind], ours(kind, layout)
    assert len(right["loss"]) == STEPS
    assert right["loss"][-1] != pytest.approx(right["loss"][0], rel=0.02)  # it learns
    rough = ROUGHNESS if kind in ROUGH else 1
    margin = MARGIN * rough
    assert found["loss"] == pytest.approx(
        right["loss"], rel=LOSS * rough, abs=0.0 if kind == "sft" else margin
    )
    assert found["grad_norm"] == pytest.approx(right["grad_norm"], rel=NORM * rough)
    for name in KINDS[kind].metrics:
        absolute = 1e-3 if name.startswith("logps/") else margin
        first = (
            2 if name == "rewards/accuracies" else 0
        )  # until the rate is above 0 there is nothing but noise
        assert found[name][first:] == pytest.approx(right[name][first:], rel=NORM, abs=absolute), name


def test_losses_of_pairs_and_their_gradients_are_those_of_trl(theirs: Theirs) -> None:
    ours = trl_formulas.by_mca()
    assert ours.keys() == theirs.formulas.keys()
    assert len({round(loss, 4) for loss, _ in ours.values()}) == len(ours)  # no two are the same
    for kind, (loss, gradient) in theirs.formulas.items():
        assert ours[kind][0] == pytest.approx(loss, rel=1e-6), kind
        assert torch.allclose(ours[kind][1], gradient, rtol=1e-5, atol=1e-6), kind


def again_without_reference(folder: Path, *, factor: float = 1.0) -> list[float]:
    """A later part of the run of ``precomputed``, of weights times ``factor``, in which no reference may be run."""
    from mca_train.trainer.reference import ReferenceModel

    trainer = quietly(lambda: mca_trainer(folder, "precomputed", "single", {}))
    for parameter in trainer.model.parameters():
        parameter.data.mul_(factor)
    kept = AssertionError("the log-probabilities were kept")
    with patch.object(ReferenceModel, "log_probs", side_effect=kept):
        quietly(trainer.train)
    return history(trainer, "loss")


@pytest.mark.qualify
def test_kept_log_probabilities_serve_the_run_that_goes_on(folder: Path, ours: Any) -> None:
    first = ours(*KEPT)["loss"]
    assert run_ranks(1, again_without_reference, folder)[0] == first
    with pytest.raises(AssertionError, match="were kept"):  # of other weights, read from the same place
        run_ranks(1, again_without_reference, folder, factor=1 + 2**-10)
    kept = folder / "precomputed-single" / "reference_log_probs" / "train.npz"
    kept.write_bytes(kept.read_bytes()[:-40])
    with pytest.raises(AssertionError, match="were kept"):
        run_ranks(1, again_without_reference, folder)


def evaluated(folder: Path) -> list[tuple[dict[str, float], dict[str, float]]]:
    """The evaluation of each kind of all rows, padded and packed; of kto at once, as its kl is measured so."""

    def of(kind: str, **sizes: Any) -> dict[str, float]:
        trainer = mca_trainer(folder, kind, "evaluated", sizes)
        found: dict[str, float] = trainer.evaluate(trainer.train_dataset)
        return {key: value for key, value in found.items() if not key.endswith(("runtime", "second"))}

    return [
        (
            of(kind, per_device_eval_batch_size=ROWS),
            of(kind, sequence_packing=True, per_device_eval_batch_size=6),
        )
        for kind in ("reward", "several", "number", "kto")
    ]


def test_packing_changes_no_score(folder: Path) -> None:
    for padded, packed in run_ranks(1, evaluated, folder)[0]:
        assert padded == pytest.approx(packed, rel=1e-5, abs=MARGIN)


RESUMED: dict[str, dict[str, Any]] = {
    "kto": {"sequence_packing": True, "seq_length": 160},
    "classes": {"sequence_packing": True, "seq_length": 160, "lora_modules_to_save": ["score"]},
    "reward": {"lora_modules_to_save": ["score"]},
}
"""Runs of adapters that stop and go on with another layout; the last by test_adapter_commands too."""


def resumed(folder: Path, kinds: list[str]) -> list[tuple[Logged, Logged]]:
    """Return, for each kind, a full run and one that resumes from its middle on another layout. Runs on every rank."""
    found = []
    for kind in kinds:
        run = RESUMED[kind] | {"lora_rank": 4, "lora_alpha": 8}
        sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "save_strategy": "steps"}
        first = mca_trainer(folder, kind, "whole", run | sizes | {"save_steps": STEPS // 2})
        quietly(first.train)
        middle = folder / f"{kind}-whole" / f"checkpoint-{STEPS // 2}"
        second = mca_trainer(folder, kind, "resumed", run | {"pipeline_model_parallel_size": 2})
        quietly(lambda second=second, middle=middle: second.train(resume_from_checkpoint=str(middle)))
        assert second.started_at_step == STEPS // 2
        names = ("loss", "grad_norm", *KINDS[kind].metrics)
        both = [{name: history(trainer, name) for name in names} for trainer in (first, second)]
        found.append((both[0], both[1]))
    return found


@pytest.mark.qualify
def test_an_adapter_goes_on_as_if_it_had_not_stopped(folder: Path) -> None:
    kinds = list(RESUMED)
    for kind, (whole, again) in zip(kinds, run_ranks(2, resumed, folder, kinds)[0], strict=True):
        assert whole["loss"][0] != pytest.approx(whole["loss"][-1], rel=1e-3), kind
        for name, values in whole.items():
            assert len(values) == STEPS
            assert again[name] == pytest.approx(values, rel=NORM, abs=MARGIN), (kind, name)
