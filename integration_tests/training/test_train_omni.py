"""Rows with text, images, videos and audio through ``mca-train``, from complete checkpoints: losses are transformers'.

`--cases all` runs both families on every layout.
"""

import copy
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cases import Case, as_params, product
from media_runs import LEARNED, RATE, STEPS, run_training

pytest.importorskip("av")
pytest.importorskip("torchvision")
pytest.importorskip("soundfile")
pytest.importorskip("soxr")
sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_omni

pytestmark = pytest.mark.ranks

MODELS = ("qwen2_5_omni", "qwen3_omni_moe")
MARKS = {
    "image": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "video": ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
    "audio": ("<|audio_start|>", "<|AUDIO|>", "<|audio_end|>"),
}
SECONDS = {"short": 0.4, "spoken": 2.3}
ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("<video>what, after <audio>?", ("clip.mp4", "spoken.wav"), "red"),
    ("nothing to see?", (), "no"),
    ("<audio> or <image>", ("short.wav", "wide.png"), "blue"),
    ("<audio><audio>?", ("spoken.wav", "short.wav"), "green it is"),
)
"""Question, its files, and the answer."""
SOUND_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("<video>what, after <audio>?", ("sounding.mkv", "short.wav"), "red"),
    ("nothing to see?", (), "no"),
    ("<image> or <video>", ("wide.png", "sounding.mkv"), "blue"),
    ("<audio>?", ("short.wav",), "green it is"),
)
"""Rows with the sound of videos."""
SOUNDING = 2.3
"""Seconds of the sound of a video."""
LAYOUTS = {
    "one": (),
    "cp2packed": (
        *("--context_parallel_size", "2", "--sequence_packing", "true", "--seq_length", "2048"),
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1"),
    ),
    "tp2sp": ("--tensor_model_parallel_size", "2", "--sequence_parallel"),
    "pp2": ("--pipeline_model_parallel_size", "2"),
}


def _config(kind: str, tokenizer: Any) -> dict[str, Any]:
    """Return ``config.json`` of a complete checkpoint with the tokens of ``tokenizer``."""
    from drawn_omni import PATCH

    config = copy.deepcopy(tiny_omni.described(kind))
    thinker = config["thinker_config"]
    ending = "index" if kind == "qwen2_5_omni" else "id"
    for medium, (start, token, end) in MARKS.items():
        ids = tokenizer.convert_tokens_to_ids([start, token, end])
        name = "audio" if medium == "audio" else "vision"
        thinker |= {f"{name}_start_token_id": ids[0], f"{name}_end_token_id": ids[2]}
        thinker[f"{medium}_token_{ending}"] = ids[1]
    thinker["text_config"] |= {"vocab_size": 272, "max_position_embeddings": 4096}
    thinker["vision_config"] |= {"patch_size": PATCH[kind], "window_size": 112}
    return config


@cache
def folder_of(kind: str, root: Path) -> Path:
    """A complete checkpoint with tokenizer and processors, files of each medium, and the rows about them."""
    import soundfile
    from drawn_images import draw, processor
    from drawn_omni import PATCH, extractor, omni_tokenizer, tone
    from drawn_videos import video_processor, write

    folder, tokenizer = root / kind, omni_tokenizer()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**_config(kind, tokenizer))
    transformers.AutoModelForMultimodalLM.from_config(config).save_pretrained(folder / "model")
    torch.save({"Chelsie": {"bos_token": 1}}, folder / "model" / tiny_omni.SPEAKERS)
    tokenizer.save_pretrained(folder / "model")
    both = {**processor().to_dict(), **extractor().to_dict()}  # in one file, as published
    both["patch_size"] = PATCH[kind]
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(both))
    video_processor("qwen2_5_omni", patch_size=PATCH[kind]).save_pretrained(folder / "model")
    draw(folder / "wide.png", 24, 16)
    write(folder / "clip.mp4", 8, 4, 16, 24)
    write(folder / "sounding.mkv", 8, 4, 16, 24, sound=tone(SOUNDING))
    for name, seconds in SECONDS.items():
        soundfile.write(folder / f"{name}.wav", tone(seconds), 16000, subtype="FLOAT")
    media = {"images": (".png",), "videos": (".mp4", ".mkv"), "audios": (".wav",)}
    for file, rows in (("sft", ROWS), ("sound", SOUND_ROWS)):
        with (folder / f"{file}.jsonl").open("w") as lines:
            for asked, files, said in rows:
                turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
                columns = {
                    name: [file for file in files if file.endswith(end)] for name, end in media.items()
                }
                lines.write(json.dumps({"messages": turns, **columns}) + "\n")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("omni")


@cache
def _inputs(folder: Path, asked: str, files: tuple[str, ...], said: str) -> dict[str, torch.Tensor]:
    """Return the inputs of transformers' own processor; clips of Qwen 3 Omni one by one, without padding."""
    from drawn_images import processor
    from drawn_omni import DEFAULT_FPS, PATCH, expected, tone
    from PIL import Image

    kind = folder.name
    tokenizer = _tokenizer()
    for medium, marks in MARKS.items():
        asked = asked.replace(f"<{medium}>", "".join(marks))
    given: dict[str, Any] = {
        "images": [Image.open(folder / file) for file in files if file.endswith(".png")],
        "audio": [tone(SECONDS[file[:-4]]) for file in files if file.endswith(".wav")],
    }
    given = {name: some for name, some in given.items() if some}
    clips = [folder / file for file in files if file.endswith((".mp4", ".mkv"))]
    if clips:
        given |= {"do_sample_frames": True, "fps": DEFAULT_FPS[kind]}
    if sounding := any(clip.suffix == ".mkv" for clip in clips):
        given["audio"] = [tone(SOUNDING), *given.get("audio", ())]
        given |= {"load_audio_from_video": True, "position_id_per_seconds": 25}
        given["audio_from_video_indices"] = [0, *[None] * (len(given["audio"]) - 1)]
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    images = processor(patch_size=PATCH[kind])
    found, whole = (
        dict(expected(kind, tokenizer, text, clips, images_processor=images, **given))
        for text in (prompt, f"{prompt}{said}<|im_end|>\n")
    )
    length, ids = found["input_ids"].shape[1], whole["input_ids"]
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < length, -100)
    if "video_second_per_grid" in whole:
        whole["video_second_per_grid"] = torch.as_tensor(whole["video_second_per_grid"])
    return {**whole, "labels": labels, **({"use_audio_in_video": True} if sounding else {})}


@cache
def _tokenizer() -> Any:
    from drawn_omni import omni_tokenizer

    return omni_tokenizer()


def _loss(model: Any, row: dict[str, torch.Tensor]) -> torch.Tensor:
    taken = {name: x for name, x in row.items() if name not in ("labels", "num_audio_tokens")}
    logits = model(**taken).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, row["labels"][0, 1:], reduction="sum")


def _part(name: str) -> str:
    """Return the part of a parameter of transformers' thinker."""
    if "merger" in name or name.startswith(("audio_tower.proj", "model.audio_tower.proj")):
        return "projector"
    return "audio" if "audio_tower" in name else "vision" if "visual" in name else "language"


@cache
def _expected(
    folder: Path, rates: tuple[tuple[str, float], ...] = (), rows_of: tuple[Any, ...] = ROWS
) -> tuple[list[float], Any]:
    """The losses of fine-tuning the thinker in transformers, with a learning rate for each part, and the thinker."""
    whole = transformers.AutoModelForMultimodalLM.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    model, rows = whole.thinker, [_inputs(folder, *row) for row in rows_of]
    count = sum(int((row["labels"] != -100).sum()) for row in rows)
    rate_of = {"language": RATE, "vision": RATE, "audio": RATE, "projector": RATE, **dict(rates)}
    groups: dict[str, list[Any]] = {part: [] for part in rate_of}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(rate_of[_part(name)] > 0)
        groups[_part(name)].append(parameter)
    assert all(groups.values())
    trained = [{"params": groups[part], "lr": rate} for part, rate in rate_of.items() if rate]
    optimizer, losses = torch.optim.AdamW(trained, weight_decay=0.0), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.stack([_loss(model, row) for row in rows]).sum() / count
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, model


@pytest.mark.cases(0)  # by default parts of the same rows train at several rates
@pytest.mark.parametrize("case", as_params(product(MODELS, tuple(LAYOUTS))))
def test_every_medium_trains_as_in_transformers(case: Case, root: Path) -> None:
    folder = folder_of(case.model, root)
    losses, model = _expected(folder)
    logs = run_training(folder, case.layout, *LAYOUTS[case.layout], seq_length=1024)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > LEARNED
    saved = transformers.AutoModelForMultimodalLM.from_pretrained(folder / case.layout / "hf")
    theirs = dict(saved.named_parameters())
    # a twentieth of a step: where a gradient is next to nothing, Adam makes a step of its rounding errors
    worst = max(
        (float((theirs[name] - x).detach().abs().max()), name) for name, x in model.named_parameters()
    )
    assert worst[0] < 5e-5, worst


@pytest.mark.cases(0, always=["qwen2_5_omni-cp2packed"])
@pytest.mark.parametrize("case", as_params(product(MODELS, tuple(LAYOUTS))))
def test_the_sound_of_videos_trains_as_in_transformers(case: Case, root: Path) -> None:
    """The tokens of a video and its sound alternate, on both sides of the parts of ranks."""
    folder = folder_of(case.model, root)
    losses, _ = _expected(folder, rows_of=SOUND_ROWS)
    words = ("--train_file", str(folder / "sound.jsonl"), "--use_audio_in_video", "--save_hf_model", "false")
    logs = run_training(folder, f"sound-{case.layout}", *words, *LAYOUTS[case.layout], seq_length=1024)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > LEARNED
    assert [log["image_tokens"] for log in logs] == [_counted(folder, "image", "video")] * STEPS
    assert [log["audio_tokens"] for log in logs] == [_counted(folder, "audio")] * STEPS


def _counted(folder: Path, *media: str) -> int:
    """Return the placeholders of ``media`` in the rows with sound."""
    ids = torch.cat([_inputs(folder, *row)["input_ids"][0] for row in SOUND_ROWS])
    return sum(int((ids == _tokenizer().convert_tokens_to_ids(MARKS[medium][1])).sum()) for medium in media)


PARTS: dict[str, tuple[tuple[str, float], ...]] = {
    "vision-frozen": (("vision", 0.0), ("audio", 3e-3), ("projector", 3e-4)),
    "audio-frozen": (("audio", 0.0), ("vision", 3e-3), ("language", 0.0)),
}
"""Learning rates of parts; 0: frozen."""
RATES = {
    "vision": "--vision_learning_rate",
    "audio": "--audio_learning_rate",
    "projector": "--projector_learning_rate",
}
PART_CASES = [Case(model, layout, (kind,)) for model in MODELS for layout in LAYOUTS for kind in PARTS]


@pytest.mark.cases(0, always=["qwen3_omni_moe-tp2sp-vision-frozen"])
@pytest.mark.parametrize(
    "case",
    as_params(PART_CASES),
)
def test_parts_train_at_their_own_rates_as_in_transformers(case: Case, root: Path) -> None:
    folder, (kind,) = folder_of(case.model, root), case.options
    losses, model = _expected(folder, PARTS[kind])
    words = ["--freeze", f"[{', '.join(part for part, rate in PARTS[kind] if not rate)}]"]
    for part, rate in PARTS[kind]:
        words += [RATES[part], str(rate)] if rate else []
    name = f"{case.layout}-{kind}"
    logs = run_training(folder, name, *words, *LAYOUTS[case.layout], seq_length=1024)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    first, before, theirs = (
        dict(each.named_parameters())
        for each in (
            transformers.AutoModelForMultimodalLM.from_pretrained(folder / "model").thinker,
            model,
            transformers.AutoModelForMultimodalLM.from_pretrained(folder / name / "hf"),
        )
    )
    rates = {"language": RATE, "vision": RATE, "audio": RATE, "projector": RATE, **dict(PARTS[kind])}
    for parameter, right in before.items():
        found, rate = theirs[parameter], rates[_part(parameter)]
        if not rate:
            assert torch.equal(found, first[parameter]), parameter
        # a twentieth of a step: where a gradient is next to nothing, Adam makes a step of its rounding errors
        assert float((found - right).detach().abs().max()) <= 0.05 * rate, parameter
