"""Rows with images, videos and audio through ``mca-train`` for Gemma 4: losses and weights are transformers'."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from media_runs import RATE, STEPS, run_training

pytest.importorskip("av")
pytest.importorskip("torchvision")
pytest.importorskip("soundfile")
pytest.importorskip("soxr")
sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_vision

pytestmark = pytest.mark.ranks

FRAMES = 3
MODELS = ("gemma4-31b", "gemma4-e2b", "gemma4_unified")
ROWS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("<image>what, before <video>?", ("wide.png",), ("clip.mp4",), "red"),
    ("nothing to see?", (), (), "no"),
    ("see <image>", ("tall.png",), (), "blue"),
    ("<video>?", (), ("clip.mp4",), "green it is"),
)
CLIPS = ("input_features", "input_features_mask")
HEARING = ("hear <audio> in <image>", ("tall.png",), (), "blue")
"""The third row of models with an audio tower."""
SOUND: dict[str, dict[str, int]] = {
    "gemma4-e2b": {"feature_size": 8},
    "gemma4_unified": {"feature_size": 12, "audio_samples_per_token": 12},
}
"""Options of the feature extractors that fit the tiny towers."""
LAYOUTS = {
    "tp2sp": ("--tensor_model_parallel_size", "2", "--sequence_parallel"),
    "cp2packed": (
        *("--context_parallel_size", "2", "--sequence_packing", "true", "--seq_length", "1024"),
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"),
    ),
}


@cache
def folder_of(model: str, root: Path) -> tuple[Path, Any]:
    """A checkpoint with its processors, media and rows about them; and the whole processor."""
    import drawn_audio
    from drawn_images import draw
    from drawn_videos import write
    from gemma4_processors import gemma4_processors, gemma4_tokenizer, token_ids

    folder, tokenizer = root / model, gemma4_tokenizer()
    model_type = tiny_vision.CASES[model][0]
    sizes = {"vocab_size": len(tokenizer)}
    config = tiny_vision.described(model, **sizes, vocab_size_per_layer_input=len(tokenizer))
    config |= token_ids(tokenizer)
    config["text_config"] |= {"sliding_window": 80, "final_logit_softcapping": None}
    position = "mm_posemb_size" if model_type == "gemma4_unified" else "position_embedding_size"
    config["vision_config"] |= {position: 80}
    torch.manual_seed(0)
    made = transformers.AutoModelForMultimodalLM.from_config(transformers.AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, tensor in made.named_buffers():
            if name.endswith(("std_bias", "std_scale")):
                tensor.fill_(0.5)
        tiny_vision.bound_linears(made)
    made.save_pretrained(folder / "model")
    own = gemma4_processors(model_type, tokenizer, patch=2, **SOUND.get(model, {}))
    for part in (tokenizer, own.images, own.videos):
        part.save_pretrained(folder / "model")
    name = "preprocessor_config.json"  # which published files share
    shared = json.loads((folder / "model" / name).read_text())
    own.audio.save_pretrained(folder / "model")
    (folder / "model" / name).write_text(
        json.dumps(json.loads((folder / "model" / name).read_text()) | shared)
    )
    draw(folder / "wide.png", 24, 16)
    draw(folder / "tall.png", 16, 40, colour=(60, 150, 90))
    write(folder / "clip.mp4", 8, 4)
    drawn_audio.write(folder / "tone.wav", 440, 0.05, rate=16_000)
    lines = []
    for asked, images, videos, said in rows_of(model):
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        audios = ["tone.wav"] * asked.count("<audio>")
        row = {"messages": turns, "images": images, "videos": videos, "audios": audios}
        lines.append(json.dumps(row) + "\n")
    (folder / "sft.jsonl").write_text("".join(lines))
    return folder, own.whole


def rows_of(model: str) -> list[tuple[str, tuple[str, ...], tuple[str, ...], str]]:
    """The rows that a model can take."""
    return [HEARING if number == 2 and model in SOUND else row for number, row in enumerate(ROWS)]


def inputs(folder: Path, whole: Any, row: tuple[str, tuple[str, ...], tuple[str, ...], str]) -> Any:
    """Return the inputs that transformers' processor makes of a row, with labels."""
    import av
    import numpy as np
    import soundfile
    from PIL import Image

    asked, images, videos, said = row
    for medium in ("image", "video", "audio"):
        asked = asked.replace(f"<{medium}>", f"<|{medium}|>")
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    media: dict[str, Any] = {}
    if images:
        media["images"] = [[Image.open(folder / name).convert("RGB") for name in images]]
    if videos:
        with av.open(str(folder / videos[0])) as container:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        media |= {"videos": [frames], "video_metadata": [{"total_num_frames": len(frames), "fps": 4.0}]}
        media |= {"do_sample_frames": True, "num_frames": FRAMES}
    if "<|audio|>" in asked:
        media["audio"] = [soundfile.read(folder / "tone.wav", dtype="float32")[0]]
    found = dict(whole(text=[f"{prompt}{said}<|im_end|>\n"], return_tensors="pt", **media))
    known = ("input_ids", "pixel_values", "image_position_ids", "pixel_values_videos", "video_position_ids")
    known += ("num_frames_per_video", "mm_token_type_ids", *CLIPS)
    kept = {name: found[name] for name in known if name in found}
    answer = len(whole.tokenizer(f"{said}<|im_end|>\n")["input_ids"])
    length = kept["input_ids"].shape[1]
    return kept | {"labels": kept["input_ids"].masked_fill(torch.arange(length) < length - answer, -100)}


def expected(folder: Path, whole: Any) -> tuple[list[float], Any]:
    """The losses of transformers' steps, and its model after them."""
    model = transformers.AutoModelForMultimodalLM.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    rows, losses = [inputs(folder, whole, row) for row in rows_of(folder.name)], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for row in rows:
            labels = row["labels"][0, 1:]
            given = {name: x for name, x in row.items() if name != "labels"}
            logits = model(**given).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        (total / count).backward()
        losses.append(float(total.detach()) / count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4")


@pytest.mark.cases(0, always=["gemma4-e2b-tp2sp"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(model, layout, id=f"{model}-{layout}") for model in MODELS for layout in LAYOUTS],
)
def test_images_videos_and_audio_train_as_in_transformers(model: str, layout: str, root: Path) -> None:
    folder, whole = folder_of(model, root)
    losses, trained = expected(folder, whole)
    words = (*LAYOUTS[layout], "--video_max_frames", str(FRAMES))
    found = [log["loss"] for log in run_training(folder, layout, *words, seq_length=512)]
    assert found == pytest.approx(losses, rel=1e-4)
    other = transformers.AutoModelForMultimodalLM.from_pretrained(folder / layout / "hf")
    theirs = dict(other.named_parameters())
    # where a gradient is next to nothing, Adam makes a step of its rounding errors
    near = [((theirs[name] - x).abs() < 0.1 * RATE).float().mean() for name, x in trained.named_parameters()]
    assert min(near) > 0.9 and sum(near) / len(near) > 0.99
