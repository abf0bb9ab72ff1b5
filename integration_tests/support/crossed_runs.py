"""Checkpoints, rows with pictures, and steps of transformers and PEFT, for runs that cross options.

Rows have two pictures, none and one, so that micro-batches and data-parallel ranks differ.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from media_runs import Row, answer_log_prob, files_by_kind, judged_answers

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_vision

STEPS, RATE = 2, 0.3
OPTIONS = ("--optimizer", "sgd", "--learning_rate", str(RATE), "--max_steps", str(STEPS))
"""Plain steps: those of Adam are rounding errors where a gradient is next to nothing."""
SIZES = {"small": (16, 16), "wide": (24, 16), "tall": (16, 40)}
ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("@what, before @?", ("small", "wide"), "red"),
    ("nothing to see?", (), "no"),
    ("see @", ("tall",), "blue"),
    ("@?", ("wide",), "green it is"),
)
GOOD = (True, False, True, True)
VOCABULARY = 272
PARTS = {"vision": ("vision_tower", "visual"), "projector": ("multi_modal_projector", "merger")}
"""Words of the names of a part's parameters; a projector's override those of the tower that holds it."""


@dataclass(frozen=True)
class Prepared:
    """A folder with a model and rows, and transformers' inputs of those.

    Args:
        folder: Has ``model``, pictures and a file of rows for each kind of run.
        inputs: Return transformers' inputs of a question, names of pictures and an answer.
    """

    folder: Path
    inputs: Callable[[str, Sequence[str], str], Row]

    def rows(self) -> list[Row]:
        """Return the inputs of all rows."""
        return [self.inputs(*row) for row in ROWS]

    def pairs(self) -> list[list[Row]]:
        """Return the inputs of a better and a worse answer to each row."""
        return [[self.inputs(*row[:2], said) for said in judged_answers(row[2]).values()] for row in ROWS]


@cache
def prepared(model: str, root: Path) -> Prepared:
    """Write a tiny ``model``, pictures and rows below ``root``."""
    from drawn_images import draw

    folder = root / model
    folder.mkdir()
    for number, (name, size) in enumerate(SIZES.items()):
        draw(folder / f"{name}.png", *size, colour=(60 * number, 200 - 50 * number, 90))
    rows = [
        (asked.replace("@", "<image>"), said, {"images": [f"{name}.png" for name in names]})
        for asked, names, said in ROWS
    ]
    kinds = files_by_kind(rows, GOOD)
    kinds["reward"] = [row | {"margin": 0.1} for row in kinds["dpo"]]
    kinds["classify"] = [row | {"label": int(good)} for row, good in zip(kinds["sft"], GOOD, strict=True)]
    for kind, lines in kinds.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts, inputs = _gemma(folder) if model == "gemma3" else _qwen(model, folder)
    for part in parts:
        part.save_pretrained(folder / "model")
    return Prepared(folder, inputs)


def _made(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForMultimodalLM.from_config(transformers.AutoConfig.for_model(**config))


def _texts(asked: str, said: str) -> tuple[str, str]:
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return prompt, f"{said}<|im_end|>\n"


def _labelled(tokenizer: Any, ids: Sequence[int], said: str, **more: Any) -> Row:
    tokens, answer = torch.tensor([ids]), len(tokenizer(said)["input_ids"])
    labels = tokens.masked_fill(torch.arange(len(ids)) < len(ids) - answer, -100)
    return {"input_ids": tokens, "labels": labels, **{name: torch.as_tensor(x) for name, x in more.items()}}


def _qwen(model: str, folder: Path) -> tuple[Iterable[Any], Callable[..., Row]]:
    from drawn_images import MARKS, image_token, image_tokenizer, processor
    from PIL import Image

    tokenizer = image_tokenizer()
    token = image_token(tokenizer)
    ids = {"vision_start_token_id": token - 1, "image_token_id": token, "vision_end_token_id": token + 1}
    config = tiny_vision.described(model, vocab_size=VOCABULARY) | ids | {"video_token_id": token + 2}

    def inputs(asked: str, names: Sequence[str], said: str) -> Row:
        prompt, answer = _texts(asked, said)
        more: Row = {}
        if names:
            images = [Image.open(folder / f"{name}.png") for name in names]
            more = dict(processor()(images=images, return_tensors="pt"))
            for grid in more["image_grid_thw"]:
                written = MARKS[0] + MARKS[1] * int(grid.prod() // 4) + MARKS[2]
                prompt = prompt.replace("@", written, 1)
        tokens = tokenizer(prompt + answer)["input_ids"]
        return _labelled(
            tokenizer, tokens, answer, mm_token_type_ids=(torch.tensor([tokens]) == token).int(), **more
        )

    return (_made(config), tokenizer, processor()), inputs


def _gemma(folder: Path) -> tuple[Iterable[Any], Callable[..., Row]]:
    from image_kinds import KINDS
    from PIL import Image

    kind, expected = KINDS["gemma3"]()
    config = tiny_vision.described("gemma3", vocab_size=VOCABULARY)
    for key, value in kind.config.vision_fields.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value

    def inputs(asked: str, names: Sequence[str], said: str) -> Row:
        prompt, answer = _texts(asked, said)
        tokens, more = kind.tokenizer(prompt + answer)["input_ids"], {}
        if names:
            images = [Image.open(folder / f"{name}.png").convert("RGB") for name in names]
            tokens, more = expected(prompt + answer, images)
        types = (torch.tensor([tokens]) == config["image_token_index"]).int()
        return _labelled(kind.tokenizer, tokens, answer, token_type_ids=types, **more)

    return (_made(config), kind.tokenizer, kind.processor), inputs


def scored(made: Prepared, labels: int) -> Path:
    """Write the model with a sequence-classification head; return its directory."""
    path = made.folder / f"scored-{labels}"
    if path.exists():
        return path
    shutil.copytree(made.folder / "model", path)
    torch.manual_seed(labels)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        made.folder / "model", num_labels=labels
    )
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    return path


def score_losses(kind: str, made: Prepared, path: Path) -> list[float]:
    """Return the losses of steps of all parts of the model in ``path``, as a reward model or a classifier."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager")

    def score(row: Row) -> torch.Tensor:
        values: torch.Tensor = model(**{name: x for name, x in row.items() if name != "labels"}).logits[0]
        return values

    def rewards() -> torch.Tensor:
        gains = torch.stack([score(better) - score(worse) for better, worse in made.pairs()])
        return -torch.nn.functional.logsigmoid(gains - 0.1).mean()

    def classes() -> torch.Tensor:
        values = torch.stack([score(row) for row in made.rows()])
        return torch.nn.functional.cross_entropy(values, torch.tensor(GOOD).long())

    return stepped(model, rewards if kind == "reward" else classes)


def part_of(name: str) -> str:
    """Return the part of the model that has the parameter ``name`` of transformers."""
    parts = [part for part in ("projector", "vision") if any(word in name for word in PARTS[part])]
    return parts[0] if parts else "language"


def write_adapter(path: Path, folder: Path) -> None:
    """Write an adapter with random values on every linear of all parts, by PEFT."""
    import peft

    settings = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder / "model")
    torch.manual_seed(1)
    peft.get_peft_model(model, settings).save_pretrained(path)


def loaded(prepared: Prepared, *, frozen: Sequence[str] = (), adapter: Path | None = None) -> Any:
    """Return transformers' model with its trained parameters."""
    model = transformers.AutoModelForMultimodalLM.from_pretrained(
        prepared.folder / "model", attn_implementation="eager"
    )
    if adapter is not None:
        import peft

        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in frozen)
    return model


def require_same_changes(
    before: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
    """Compare the changes of tensors by training."""
    assert ours.keys() == theirs.keys()
    changes = {name: right - before[name] for name, right in theirs.items()}
    largest = max(float(change.abs().max()) for change in changes.values())
    assert largest > 1e-3
    errors = {
        name: float((ours[name] - theirs[name]).abs().max()) / max(float(change.abs().max()), 1e-2 * largest)
        for name, change in changes.items()
    }
    worst = max((error, name) for name, error in errors.items())
    assert worst[0] < 2e-3, worst  # weights of 1 keep changes of 1e-4 to 1e-3 of themselves in fp32


def stepped(model: Any, loss: Callable[[], torch.Tensor]) -> list[float]:
    """Return the losses of clipped steps of SGD of ``model``'s trained parameters."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = loss()
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


def losses_of(
    kind: str, prepared: Prepared, model: Any, reference: Callable[[Row], torch.Tensor]
) -> list[float]:
    """Return the losses of some steps of a run of ``kind``.

    Args:
        kind: A key of `LOSSES`.
        prepared: The rows.
        model: transformers' model, which is trained.
        reference: Return the log-probability of a row's answer before training.
    """
    return stepped(model, LOSSES[kind](prepared, model, reference))


Reference = Callable[[Row], torch.Tensor]


def _sft(prepared: Prepared, model: Any, reference: Reference) -> Callable[[], torch.Tensor]:
    rows = prepared.rows()
    count = sum(int((row["labels"][0, 1:] != -100).sum()) for row in rows)
    return lambda: -torch.stack([answer_log_prob(model, row) for row in rows]).sum() / count


def _dpo(prepared: Prepared, model: Any, reference: Reference) -> Callable[[], torch.Tensor]:
    pairs = prepared.pairs()
    before = [[reference(row) for row in pair] for pair in pairs]

    def loss() -> torch.Tensor:
        gains = [
            [answer_log_prob(model, row) - old for row, old in zip(pair, olds, strict=True)]
            for pair, olds in zip(pairs, before, strict=True)
        ]
        margins = torch.stack([better - worse for better, worse in gains])
        return -torch.nn.functional.logsigmoid(0.1 * margins).mean()

    return loss


def _kto(prepared: Prepared, model: Any, reference: Reference) -> Callable[[], torch.Tensor]:
    own = prepared.rows()
    others = [prepared.inputs(*row[:2], ROWS[number - 1][2]) for number, row in enumerate(ROWS)]
    before, before_others = ([reference(row) for row in rows] for rows in (own, others))
    signs = torch.tensor(GOOD).float() * 2 - 1

    def loss() -> torch.Tensor:
        with torch.no_grad():
            gains = [
                answer_log_prob(model, row) - old for row, old in zip(others, before_others, strict=True)
            ]
            kl = torch.stack(gains).mean().clamp(min=0)
        away = torch.stack([answer_log_prob(model, row) - old for row, old in zip(own, before, strict=True)])
        return (1 - torch.sigmoid(signs * (away - kl))).mean()

    return loss


LOSSES = {"sft": _sft, "dpo": _dpo, "kto": _kto}
"""Losses of each kind of run."""
