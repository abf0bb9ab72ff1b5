"""Rows with pictures through ``mca-train``: losses, and what is trained, are transformers' on every layout.

`--cases all` runs more families, kinds and layouts.
"""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forked_cli

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_vision

pytestmark = pytest.mark.ranks

STEPS, RATE, VISION, PROJECTOR = 2, 1e-3, 5e-4, 2e-3
MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
DEFAULT = pytest.mark.cases(0, always=["qwen2_5_vl"])
PICTURES = {"small": (16, 16), "wide": (24, 16), "tall": (16, 40)}
ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("<image>what, beside <image>?", ("small", "wide"), "red"),
    ("nothing to see?", (), "no"),
    ("see <image>", ("tall",), "blue"),
    ("<image>?", ("wide",), "green it is"),
)
GOOD = (True, False, True, True)
Row = dict[str, torch.Tensor]
"""transformers' inputs for one row, with labels."""
Said = Callable[[Row], torch.Tensor]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tokenizer and image processor, pictures, and the rows about them."""
    from drawn_images import draw, image_tokenizer, processor

    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = image_tokenizer()
    ids = dict(
        zip(("vision_start_token_id", "image_token_id", "vision_end_token_id"), (260, 261, 262), strict=True)
    )
    config = tiny_vision.described(request.param, vocab_size=264) | ids | {"video_token_id": 263}
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**config))
    made.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    processor().save_pretrained(folder / "model")
    for number, (name, size) in enumerate(PICTURES.items()):
        draw(folder / f"{name}.png", *size, colour=(60 * number, 200 - 50 * number, 90))
    for kind, rows in _files().items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _files() -> dict[str, list[dict[str, Any]]]:
    """The rows of each kind of run."""
    kinds = ("sft", "dpo", "kto", "pretrain", "reward", "classify")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for (asked, pictures, said), good in zip(ROWS, GOOD, strict=True):
        images = {"images": [f"{name}.png" for name in pictures]}
        turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]
        found["sft"].append({"conversations": turns, **images})
        prompt = {"prompt": [{"role": "user", "content": asked}], **images}
        sides = {side: [{"role": "assistant", "content": answer}] for side, answer in _answers(said).items()}
        found["dpo"].append({**prompt, **sides})
        found["reward"].append({**prompt, **sides, "margin": 0.1})
        turn = {"role": "user", "content": asked}
        found["classify"].append({"messages": [turn, *sides["chosen"]], "label": int(good), **images})
        found["kto"].append({**prompt, "completion": sides["chosen"], "label": good})
        found["pretrain"].append({"text": f"{asked} {said}", **images})
    return found


def _answers(said: str) -> dict[str, str]:
    return {"chosen": said, "rejected": f"not {said} at all"}


def _trained(folder: Path, name: str, *words: str, kind: str = "sft") -> list[dict[str, float]]:
    run = {
        "model_name_or_path": str(folder / "model"),
        "train_file": str(folder / f"{kind}.jsonl"),
        "output_dir": str(folder / name),
        "seq_length": 128,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_hf_model": True,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(run))
    command = [sys.executable, "-m", "mca_train", kind, str(folder / f"{name}.yaml"), *words]
    done = forked_cli.launched(command)
    assert done.returncode == 0, done.stderr
    lines = (folder / name / "train_log.jsonl").read_text().splitlines()
    return [log for line in lines if "loss" in (log := json.loads(line))]


def _inputs(folder: Path, asked: str, pictures: tuple[str, ...], said: str) -> Row:
    """Return transformers' inputs of a row."""
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return _encoded(folder, prompt, pictures, f"{said}<|im_end|>\n")


def _encoded(folder: Path, text: str, pictures: tuple[str, ...], said: str) -> Row:
    """The same of a text whose last part is trained on; placeholders are written out in it."""
    from drawn_images import MARKS, processor
    from PIL import Image

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    found: Row = {}
    if pictures:
        images = [Image.open(folder / f"{name}.png") for name in pictures]
        found = dict(processor()(images=images, return_tensors="pt"))
        for grid in found["image_grid_thw"]:
            pads = MARKS[1] * int(grid.prod() // 4)
            text = text.replace("<image>", MARKS[0] + pads + MARKS[2], 1)
    prompt, whole = (tokenizer(words)["input_ids"] for words in (text, f"{text}{said}"))
    ids = torch.tensor([whole])
    labels = ids.masked_fill(torch.arange(len(whole)) < len(prompt), -100)
    return {"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == 261).int(), **found}


@cache
def _expected(folder: Path, frozen: str = "none") -> tuple[list[float], Any]:
    """The losses of steps that transformers makes in one process, and its model after them."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    rates = {"language": RATE, "vision": VISION, "projector": PROJECTOR}
    groups: dict[str, list[torch.nn.Parameter]] = {part: [] for part in rates}
    for name, parameter in model.named_parameters():
        part = "vision" if "visual" in name else "language"
        groups["projector" if "merger" in name else part].append(parameter)
    for parameter in groups.get(frozen, ()):
        parameter.requires_grad_(False)
    steps = [{"params": groups[part], "lr": rate} for part, rate in rates.items() if part != frozen]
    optimizer = torch.optim.AdamW(steps, weight_decay=0.0)
    rows, losses = [_inputs(folder, *row) for row in ROWS], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for row in rows:
            labels = row["labels"][0, 1:]
            logits = model(**{k: v for k, v in row.items() if k != "labels"}).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        (total / count).backward()
        losses.append(float(total.detach()) / count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, model


ALL = ("--freeze", "[]", "--vision_learning_rate", str(VISION), "--projector_learning_rate", str(PROJECTOR))
SPLIT = ("--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "2", "--sequence_parallel")
PACKS = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2")


def _worst(found: Path, model: Any) -> tuple[float, str]:
    """The largest difference of a parameter, and its name."""
    other = transformers.AutoModelForImageTextToText.from_pretrained(found)
    theirs = dict(other.named_parameters())
    return max((float((theirs[name] - x).detach().abs().max()), name) for name, x in model.named_parameters())


def _answers_alike(found: Path, model: Any, folder: Path) -> None:
    """transformers makes of an export's directory, of rows with pictures, the logits of ``model``."""
    other = transformers.AutoModelForImageTextToText.from_pretrained(found, attn_implementation="eager")
    for row in ROWS:
        inputs = {name: x for name, x in _inputs(folder, *row).items() if name != "labels"}
        with torch.no_grad():
            theirs, ours = model(**inputs).logits, other(**inputs).logits
        assert torch.allclose(ours, theirs, atol=2e-4, rtol=0), float((ours - theirs).abs().max())


@pytest.mark.qualify  # by default replicas train all parts
def test_all_parts_train_as_in_transformers(folder: Path) -> None:
    losses, model = _expected(folder)
    logs = _trained(folder, "one", *ALL, "--dataloader_num_workers", "1")
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert [log["image_tokens"] for log in logs] == [(4 + 6) + 10 + 6] * STEPS
    assert _worst(folder / "one" / "hf", model)[0] < 2e-5


@pytest.mark.qualify
def test_the_same_on_four_ranks_packed_and_resumed(folder: Path) -> None:
    losses, model = _expected(folder)
    packed = (*PACKS, "--sequence_packing", "true", "--seq_length", "96")
    saving = ("--save_strategy", "steps", "--save_steps", "1")
    _trained(folder, "four", *ALL, *SPLIT, *packed, *saving, "--max_steps", "1")
    logs = _trained(folder, "four", *ALL, *SPLIT, *packed, *saving, "--resume_from_checkpoint", "auto")
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert _worst(folder / "four" / "hf", model)[0] < 2e-5
    _answers_alike(folder / "four" / "hf", model, folder)


@DEFAULT
def test_replicas_with_and_without_an_image_reduce_gradients_in_one_order(folder: Path) -> None:
    losses, model = _expected(folder)
    lines = (folder / "sft.jsonl").read_text().splitlines()
    late = folder / "late.jsonl"  # the row without an image is in the last micro-batch of one replica
    late.write_text("".join(lines[number] + "\n" for number in (0, 2, 1, 3)))
    overlap = ("--train_file", str(late), "--nproc_per_node", "2", "--overlap_grad_reduce")
    small = ("--ddp_bucket_size", "500", "--ddp_timeout", "40")
    logs = _trained(folder, "overlap", *ALL, *PACKS, *overlap, *small, "--dataloader_num_workers", "1")
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert [log["image_tokens"] for log in logs] == [(4 + 6) + 10 + 6] * STEPS
    assert _worst(folder / "overlap" / "hf", model)[0] < 2e-5


def _said(model: Any, row: Row) -> torch.Tensor:
    """The log-probability of the answer in a row."""
    labels = row["labels"][0, 1:]
    logits = model(**{k: v for k, v in row.items() if k != "labels"}).logits[0, :-1]
    return -torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def _stepped(folder: Path, loss: Callable[[Said, Said], torch.Tensor]) -> list[float]:
    """The losses of steps that transformers makes in one process.

    Args:
        folder: The fixture's.
        loss: Of a step, from what says an answer's log-probability, and by how much it has grown.
    """
    model, frozen = (
        transformers.AutoModelForImageTextToText.from_pretrained(
            folder / "model", attn_implementation="eager"
        )
        for _ in range(2)
    )
    optimizer, losses = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0), []

    def gained(row: Row) -> torch.Tensor:
        with torch.no_grad():
            before = _said(frozen, row)
        return _said(model, row) - before

    for _ in range(STEPS):
        total = loss(lambda row: _said(model, row), gained)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


def _pair_losses(folder: Path) -> list[float]:
    """Return the losses of DPO."""
    pairs = [
        [_inputs(folder, asked, pictures, answer) for answer in _answers(said).values()]
        for asked, pictures, said in ROWS
    ]

    def loss(_: Said, gained: Said) -> torch.Tensor:
        margins = torch.stack([gained(better) - gained(worse) for better, worse in pairs])
        return -torch.nn.functional.logsigmoid(0.1 * margins).mean()

    return _stepped(folder, loss)


def _judged_losses(folder: Path) -> list[float]:
    """Return the losses of KTO, whose ``kl`` is measured on the answers to the rows before."""
    own = [_inputs(folder, *row) for row in ROWS]
    others = [_inputs(folder, *row[:2], ROWS[number - 1][2]) for number, row in enumerate(ROWS)]
    signs = torch.tensor(GOOD).float() * 2 - 1

    def loss(_: Said, gained: Said) -> torch.Tensor:
        with torch.no_grad():
            kl = torch.stack([gained(row) for row in others]).mean().clamp(min=0)
        away = torch.stack([gained(row) for row in own]) - kl
        return (1 - torch.sigmoid(signs * away)).mean()

    return _stepped(folder, loss)


def _text_losses(folder: Path) -> list[float]:
    """Return the losses of a block of all texts."""
    text = "".join(f"{asked} {said}<|eos|>" for asked, _, said in ROWS)
    row = _encoded(folder, text, tuple(name for _, names, _ in ROWS for name in names), "")
    row["labels"] = row["input_ids"].masked_fill(row["input_ids"] == 261, -100)
    count = int((row["labels"][0, 1:] != -100).sum())
    return _stepped(folder, lambda said, _: -said(row) / count)


LAYOUTS = {
    "one": (),
    "tp2": ("--tensor_model_parallel_size", "2", "--sequence_parallel"),
    "tp2-pp2": SPLIT,
    "cp2": ("--context_parallel_size", "2"),
}


@pytest.mark.qualify
@pytest.mark.parametrize("layout", LAYOUTS)
def test_judged_answers_to_pictures_train_as_in_transformers(layout: str, folder: Path) -> None:
    reported = ("--freeze", "[]", "--kto_beta", "1", "--save_hf_model", "false", *LAYOUTS[layout])
    logs = _trained(folder, f"judged-{layout}", *reported, kind="kto")
    losses = _judged_losses(folder)
    assert abs(losses[-1] - losses[0]) > 0.01
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)


@pytest.mark.qualify
@pytest.mark.parametrize("source", ["file", "stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_with_pictures_train_as_in_transformers(layout: str, source: str, folder: Path) -> None:
    alone = (
        "--per_device_train_batch_size",
        "1",
        "--gradient_accumulation_steps",
        "1",
        "--seq_length",
        "400",
    )
    reported = ("--freeze", "[]", "--save_hf_model", "false", *alone, *LAYOUTS[layout])
    reported += ("--streaming", str(source == "stream").lower())
    logs = _trained(folder, f"texts-{layout}-{source}", *reported, kind="pretrain")
    losses = _text_losses(folder)
    assert [log["image_tokens"] for log in logs] == [(4 + 6) + 10 + 6] * STEPS
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)


@pytest.mark.qualify
@pytest.mark.parametrize("layout", [*LAYOUTS, "dp2"])
def test_a_stream_of_pictures_trains_as_in_transformers(layout: str, folder: Path) -> None:
    losses, _ = _expected(folder)
    split = LAYOUTS.get(layout, ("--nproc_per_node", "2", "--gradient_accumulation_steps", "1"))
    reported = (*ALL, "--streaming", "true", "--save_hf_model", "false", *split)
    logs = _trained(folder, f"stream-{layout}", *reported)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)


@pytest.mark.qualify  # test_media_crossings.py has pairs with pictures, an adapter and packs
def test_pairs_with_pictures_are_compared_as_in_transformers(folder: Path) -> None:
    split = LAYOUTS["tp2"]
    logs = _trained(folder, "pairs", "--freeze", "[]", *split, "--save_hf_model", "false", kind="dpo")
    losses = _pair_losses(folder)
    assert abs(losses[-1] - losses[0]) > 0.01
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)


SCORED = pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)


def _scored(folder: Path, labels: int) -> Path:
    """Save the model with a sequence-classification head, and return its directory."""
    path = folder / f"scored-{labels}"
    if path.exists():
        return path
    torch.manual_seed(labels)
    found = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=labels
    )
    torch.nn.init.normal_(found.score.weight)
    found.save_pretrained(path)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
    ):
        if (folder / "model" / name).exists():
            shutil.copy(folder / "model" / name, path)
    return path


def _score(model: Any, row: Row) -> torch.Tensor:
    """Return the scores of a row's last token."""
    inputs = {name: x for name, x in row.items() if name != "labels"}
    scores: torch.Tensor = model(**inputs).logits[0]
    return scores


def _score_losses(path: Path, loss: Callable[[Any], torch.Tensor]) -> list[float]:
    """Return the losses of steps of all parts that transformers makes in one process."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager")
    optimizer, losses = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0), []
    for _ in range(STEPS):
        total = loss(model)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


def _reward_losses(folder: Path, path: Path) -> list[float]:
    """Return the losses of a reward model, whose pairs have a margin."""
    pairs = [
        [_inputs(folder, asked, pictures, answer) for answer in _answers(said).values()]
        for asked, pictures, said in ROWS
    ]

    def loss(model: Any) -> torch.Tensor:
        gains = [_score(model, better) - _score(model, worse) for better, worse in pairs]
        return -torch.nn.functional.logsigmoid(torch.stack(gains) - 0.1).mean()

    return _score_losses(path, loss)


def _class_losses(folder: Path, path: Path) -> list[float]:
    """Return the losses of a classification."""
    rows = [_inputs(folder, *row) for row in ROWS]
    classes = torch.tensor(GOOD).long()

    def loss(model: Any) -> torch.Tensor:
        scores = torch.stack([_score(model, row) for row in rows])
        return torch.nn.functional.cross_entropy(scores, classes)

    return _score_losses(path, loss)


ONE_LAYER = ("--recompute_num_layers", "1")
HEAD_LAYOUTS = {
    **{name: (*words, "--save_hf_model", "false") for name, words in LAYOUTS.items()},
    "packed": (*PACKS, "--sequence_packing", "true", "--seq_length", "192", *LAYOUTS["cp2"]),
    "recompute": ("--recompute_granularity", "full", "--recompute_method", "uniform", *ONE_LAYER),
    "stream": ("--streaming", "true"),
}


@SCORED
@pytest.mark.cases(0)
@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_rewards_of_pictures_train_as_in_transformers(layout: str, folder: Path) -> None:
    path = _scored(folder, 1)
    model = ("--model_name_or_path", str(path), "--freeze", "[]", *HEAD_LAYOUTS[layout])
    logs = _trained(folder, f"reward-{layout}", *model, kind="reward")
    losses = _reward_losses(folder, path)
    assert abs(losses[-1] - losses[0]) > 0.01
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)


@SCORED
@pytest.mark.cases(0)
@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_classes_of_pictures_train_as_in_transformers(layout: str, folder: Path) -> None:
    path = _scored(folder, 2)
    model = ("--model_name_or_path", str(path), "--freeze", "[]", "--num_labels", "2", *HEAD_LAYOUTS[layout])
    logs = _trained(folder, f"classify-{layout}", *model, kind="classify")
    losses = _class_losses(folder, path)
    assert abs(losses[-1] - losses[0]) > 0.01
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)


@pytest.mark.qualify
def test_the_text_part_may_be_frozen(folder: Path) -> None:
    """The last stage has nothing to train then, and one row in four has no image."""
    losses, model = _expected(folder, "language")
    rates = ("--vision_learning_rate", str(VISION), "--projector_learning_rate", str(PROJECTOR))
    logs = _trained(folder, "seeing", "--freeze", "[language]", *rates, *SPLIT)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert _worst(folder / "seeing" / "hf", model)[0] < 2e-5


@DEFAULT
def test_vision_and_projector_are_frozen_by_default(folder: Path) -> None:
    before = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model")
    losses, _ = _expected(folder)
    saving = ("--max_steps", "1", "--save_strategy", "steps", "--save_steps", "1")
    logs = _trained(folder, "frozen", *saving, "--vision_learning_rate", "null")
    assert logs[0]["loss"] == pytest.approx(losses[0], rel=1e-5)
    after = transformers.AutoModelForImageTextToText.from_pretrained(folder / "frozen" / "hf")
    changed = {
        name: not torch.equal(x, y)
        for (name, x), y in zip(before.named_parameters(), after.parameters(), strict=True)
    }
    assert not any(value for name, value in changed.items() if "visual" in name)
    assert all(value for name, value in changed.items() if "visual" not in name and "norm" in name)
    kept = [path for path in (folder / "frozen" / "checkpoint-1").rglob("*") if path.is_file()]
    assert kept
