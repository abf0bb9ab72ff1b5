"""Rows with clips through ``mca-train``: losses, and what is trained, are transformers' on every layout.

`--cases all` runs more families, kinds and layouts.
"""

import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cases import Case, as_params, product
from media_runs import (
    LAYOUTS,
    LEARNED,
    Row,
    adamw_losses,
    answer_log_prob,
    files_by_kind,
    load_model,
    require_judged_as_in_transformers,
    run_training,
)

pytest.importorskip("av")
pytest.importorskip("torchvision")
sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_vision

pytestmark = pytest.mark.ranks

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "lfm3_vl")
CLIPS = {"short": (8, 4, 16, 24), "long": (23, 5, 24, 16)}
"""Frames, frames per second, height and width."""
ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("<video>what, after <image>?", ("short", "wide"), "red"),
    ("nothing to see?", (), "no"),
    ("<image> or <video>", ("wide", "long"), "blue"),
    ("<video><video>?", ("long", "short"), "green it is"),
)
GOOD = (True, False, True, True)


@cache
def folder_of(model: str, root: Path) -> Path:
    """A checkpoint with tokenizer and processors, clips, a picture, and the rows about them."""
    from drawn_images import draw, processor
    from drawn_videos import video_processor, video_tokenizer, write

    folder = root / model
    tokenizer = video_tokenizer()
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = dict(zip(names, (260, 261, 262, 263), strict=True))
    config = tiny_vision.described(model, vocab_size=272) | ids
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**config))
    made.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    processor().save_pretrained(folder / "model")
    video_processor(model).save_pretrained(folder / "model")
    draw(folder / "wide.png", 24, 16)
    for name, sizes in CLIPS.items():
        write(folder / f"{name}.mp4", *sizes)
    for kind, rows in _files().items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("videos")


def _files() -> dict[str, list[dict[str, Any]]]:
    """The rows of each kind of run."""
    rows = []
    for asked, media, said in ROWS:
        images = ["wide.png" for name in media if name == "wide"]
        videos = [f"{name}.mp4" for name in media if name in CLIPS]
        rows.append((asked, said, {"images": images, "videos": videos}))
    return files_by_kind(rows, GOOD)


@cache
def _frames(file: Path) -> tuple[Any, dict[str, float]]:
    """All frames of a clip, and what transformers' video processor must know of it."""
    import av

    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        frames = torch.stack(
            [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
        )
        return frames.numpy(), {"total_num_frames": len(frames), "fps": float(stream.average_rate)}


def _inputs(folder: Path, asked: str, media: tuple[str, ...], said: str) -> Row:
    """Return the inputs that transformers' own processor makes of a row."""
    from drawn_images import MARKS
    from drawn_videos import VIDEO_MARK, whole_processor
    from PIL import Image

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    processor = whole_processor(folder.name, tokenizer)
    written = {"<image>": "".join(MARKS), "<video>": MARKS[0] + VIDEO_MARK + MARKS[2]}
    for tag, mark in written.items():
        asked = asked.replace(tag, mark)
    clips = [_frames(folder / f"{name}.mp4") for name in media if name in CLIPS]
    given: dict[str, Any] = {
        "images": [Image.open(folder / "wide.png") for name in media if name == "wide"],
        "videos": [frames for frames, _ in clips],
    }
    given = {name: files for name, files in given.items() if files}
    options = {"video_metadata": [known for _, known in clips], "do_sample_frames": True, "fps": 2}
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    found, whole = (
        dict(processor(text=[text], **given, **(options if clips else {}), return_tensors="pt"))
        for text in (prompt, f"{prompt}{said}<|im_end|>\n")
    )
    del whole["attention_mask"]
    length, ids = found["input_ids"].shape[1], whole["input_ids"]
    return {**whole, "labels": ids.masked_fill(torch.arange(ids.shape[1]) < length, -100)}


@cache
def _expected(folder: Path) -> tuple[list[float], Any]:
    """The losses of fine-tuning, and the model after it."""
    model, rows = load_model(folder / "model"), [_inputs(folder, *row) for row in ROWS]
    count = sum(int((row["labels"] != -100).sum()) for row in rows)
    return adamw_losses(model, lambda: -sum(answer_log_prob(model, row) for row in rows) / count), model


@pytest.mark.cases(0, always=["qwen3_vl-tp2sp"])
@pytest.mark.parametrize("case", as_params(product(MODELS, tuple(LAYOUTS))))
def test_clips_train_as_in_transformers(case: Case, root: Path) -> None:
    folder = folder_of(case.model, root)
    losses, model = _expected(folder)
    workers = ("--dataloader_num_workers", "1") if case.layout == "one" else ()
    logs = run_training(folder, case.layout, *LAYOUTS[case.layout], *workers)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > LEARNED
    theirs = dict(load_model(folder / case.layout / "hf").named_parameters())
    # a twentieth of a step: where a gradient is next to nothing, Adam makes a step of its rounding errors; those of a
    # delta net are 1e-5
    within = 2e-4 if case.model == "qwen3_5" else 5e-5
    worst = max(
        (float((theirs[name] - x).detach().abs().max()), name) for name, x in model.named_parameters()
    )
    assert worst[0] < within, worst


@pytest.mark.qualify
def test_an_adapter_and_frozen_parts_see_clips(root: Path) -> None:
    """The first loss is that of the model, and the tower stays as it was."""
    folder = folder_of("qwen2_5_vl", root)
    losses, _ = _expected(folder)
    words = ("--freeze", "[vision, projector]", *LAYOUTS["tp2sp"])
    for name, more in (("lora", ("--lora_rank", "4")), ("frozen", ())):
        logs = run_training(folder, name, *words, *more)
        assert logs[0]["loss"] == pytest.approx(losses[0], rel=1e-5)
        assert logs[-1]["loss"] < losses[0] - 1e-4
    before, after = (dict(load_model(folder / each).named_parameters()) for each in ("model", "frozen/hf"))
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert changed and not any("visual" in name for name in changed)


@pytest.mark.qualify
@pytest.mark.parametrize("case", as_params(product(("qwen2_5_vl", "qwen3_vl"), ("one", "tp2sp", "pp2"))))
def test_judged_answers_to_clips_train_as_in_transformers(case: Case, root: Path) -> None:
    folder = folder_of(case.model, root)
    require_judged_as_in_transformers(
        folder, case.layout, partial(load_model, folder / "model"), partial(_inputs, folder), ROWS, GOOD
    )
