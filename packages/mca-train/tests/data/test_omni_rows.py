"""Rows of Qwen's omni models become the samples that the checkpoint's own processor makes of them."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from drawn_images import MARKS, draw, processor
from image_samples import asked, text
from PIL import Image

from mca_config.errors import McaError
from mca_models.media import positions
from mca_train.config.renamed_options import RENAMED
from mca_train.data.image_rows import ImageReader
from mca_train.tasks.load import load_tokenized
from mca_train.tasks.table import TASKS

av = pytest.importorskip("av")
pytest.importorskip("torchvision")
soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")
from drawn_omni import (  # noqa: E402
    AUDIO_MARKS,
    DEFAULT_FPS,
    KINDS,
    PATCH,
    RATE,
    expected,
    extractor,
    omni_tokenizer,
    tone,
)
from drawn_videos import VIDEO_MARK, video_processor, write  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")

PER_SECOND = 13


CLIPS = {"short": 0.43, "spoken": 2.71}
"""Seconds of each audio clip."""


@pytest.fixture(scope="module")
def tokenizer():
    return omni_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    write(folder / "clip.mp4", 12, 4)
    write(folder / "long.mkv", 23, 5, 24, 16)
    for name, seconds in CLIPS.items():
        soundfile.write(folder / f"{name}.wav", tone(seconds), RATE, subtype="FLOAT")
    draw(folder / "wide.png", 24, 16)
    both = {**processor().to_dict(), **extractor().to_dict()}  # in one file, as published
    (folder / "preprocessor_config.json").write_text(json.dumps(both))
    for kind, size in PATCH.items():
        video_processor("qwen2_5_omni", patch_size=size).save_pretrained(folder / kind)
    return folder


def model_config(kind, tokenizer):
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark)
        for name, mark in zip(
            ("vision_start", "image", "vision_end", "video", "audio_start", "audio", "audio_end"),
            (*MARKS, VIDEO_MARK, *AUDIO_MARKS),
            strict=True,
        )
    }
    fields = {**ids, "position_id_per_seconds": PER_SECOND, "vision_config": {}, "audio_config": {}}
    return SimpleNamespace(model_type=f"{kind}_thinker", vision_fields=fields)


def load(rows, kind, tokenizer, folder, **options):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = ImageReader(config=model_config(kind, tokenizer), directories=(folder / kind, folder))
    given = TASKS["sft"].data_arguments(model_name_or_path="m", **options)
    return load_tokenized(TASKS["sft"], [str(file)], tokenizer, given, images=reader)


def their_positions(kind, config, right):
    """Return transformers' positions for what its processor made."""
    ids = {name: value for name, value in config.vision_fields.items() if name.endswith("_token_id")}
    if kind == "qwen2_5_omni":
        medium = ("image", "video", "audio")
        ids |= {f"{name}_token_index": ids.pop(f"{name}_token_id") for name in medium}
    made = transformers.AutoConfig.for_model(
        f"{kind}_thinker",
        **ids,
        position_id_per_seconds=PER_SECOND,
        text_config={"num_hidden_layers": 0},
        vision_config={"depth": 1, "deepstack_visual_indexes": [], "fullatt_block_indexes": []},
        audio_config={"encoder_layers": 1},
    )
    with torch.device("meta"):
        theirs = transformers.AutoModel.from_config(made)
    mask = right.get("feature_attention_mask")
    return theirs.get_rope_index(
        right["input_ids"],
        right.get("image_grid_thw"),
        right.get("video_grid_thw"),
        torch.ones_like(right["input_ids"]),
        audio_seqlens=None if mask is None else mask.sum(1),
        second_per_grids=torch.as_tensor(right["video_second_per_grid"]),
    )[0][:, 0]


@pytest.mark.parametrize("fps", [None, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_frames_and_times_of_videos_are_those_of_the_processor(kind, fps, tokenizer, folder):
    row = asked({"type": "video", "path": "clip.mp4"}, text(" or "), {"type": "video", "path": "long.mkv"})
    (sample,) = load([row], kind, tokenizer, folder, **({} if fps is None else {"video_fps": fps}))
    plain = MARKS[0] + VIDEO_MARK + MARKS[2]
    said = f"<|im_start|>user\n{plain} or {plain}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    files = [folder / "clip.mp4", folder / "long.mkv"]
    asked_for = DEFAULT_FPS[kind] if fps is None else fps
    right = expected(kind, tokenizer, said, files, do_sample_frames=True, fps=asked_for)
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.decode(right["input_ids"][0])
    made = sample["images"].tensors()
    assert torch.equal(made["pixel_values"], right["pixel_values_videos"])
    assert right["video_grid_thw"][:, 0].max() > 1
    found = torch.from_numpy(positions(len(sample["input_ids"]), sample["images"].places))
    where = their_positions(kind, model_config(kind, tokenizer), right)
    assert torch.equal(found.to(where.dtype), where)
    assert bool((where % 1).any()) == (kind == "qwen3_omni_moe" and fps is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_every_medium_are_those_of_the_processor(kind, tokenizer, folder):
    names = ("audio/spoken.wav", "video/clip.mp4", "image/wide.png", "audio/short.wav")
    parts = [{"type": medium, "path": name} for medium, name in (each.split("/") for each in names)]
    (sample,) = load([asked(*parts[:2], text(" or "), *parts[2:])], kind, tokenizer, folder)
    heard, seen, shown = "".join(AUDIO_MARKS), "".join(MARKS), MARKS[0] + VIDEO_MARK + MARKS[2]
    said = (
        f"<|im_start|>user\n{heard}{shown} or {seen}{heard}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    )
    right = expected(
        kind,
        tokenizer,
        said,
        [folder / "clip.mp4"],
        images=[Image.open(folder / "wide.png")],
        audio=[tone(CLIPS["spoken"]), tone(CLIPS["short"])],
        do_sample_frames=True,
        fps=DEFAULT_FPS[kind],
    )
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.decode(right["input_ids"][0])
    made, places = sample["images"].tensors(), sample["images"].places
    kept = made["feature_attention_mask"].bool()
    theirs = torch.as_tensor(right["feature_attention_mask"]).bool()
    assert kept.sum(1).tolist() == theirs.sum(1).tolist() == [271, 43]
    if kind == "qwen3_omni_moe":  # of clips that are padded, the last frame sees the padding; none is here
        theirs[1, 42], kept[1, 42] = False, False
    mels = [
        x.transpose(1, 2)[mask]
        for x, mask in ((made["input_features"], kept), (right["input_features"], theirs))
    ]
    assert torch.equal(*mels) and mels[0].std() > 0.1
    found = torch.from_numpy(positions(len(sample["input_ids"]), places))
    where = their_positions(kind, model_config(kind, tokenizer), right)
    assert torch.equal(found.to(where.dtype), where)
    heard = [place.tokens for place in places if place.medium == "audio"]
    assert sum(heard) == (right["input_ids"] == tokenizer.audio_token_id).sum() and heard[0] > heard[1]


def test_qwen3_omni_hears_clips_of_any_length(tokenizer, folder):
    soundfile.write(folder / "long.wav", tone(31.5), RATE)
    row = asked({"type": "audio", "path": "long.wav"}, text("?"))
    (sample,) = load([row], "qwen3_omni_moe", tokenizer, folder)
    made = sample["images"].tensors()
    assert made["input_features"].shape[-1] == made["feature_attention_mask"].sum() == 3150
    assert sample["images"].tokens == 31 * 13 + 7
    with pytest.raises(McaError, match=r"it lasts 31\.5 seconds, and the model hears at most 30; cut it"):
        load([row], "qwen2_5_omni", tokenizer, folder)


@pytest.mark.parametrize("key", ["use_audio_in_video", "load_audio_from_video"])
def test_the_sound_of_a_video_is_refused(key, tokenizer, folder):
    row = asked({"type": "video", "path": "clip.mp4", key: True})
    with pytest.raises(
        McaError, match=f"a video has {key}, but mca does not read the sound of videos; remove it"
    ):
        load([row], "qwen2_5_omni", tokenizer, folder)
    assert RENAMED[key].startswith("the sound of a video is not read; remove the key")
    (sample,) = load(
        [asked({"type": "video", "path": "clip.mp4", key: False})], "qwen2_5_omni", tokenizer, folder
    )
    assert sample["images"].tokens


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_at_the_rate_of_the_checkpoints_processor(kind, tokenizer, folder, tmp_path):
    (tmp_path / kind).mkdir()
    for name in ("preprocessor_config.json", f"{kind}/video_preprocessor_config.json"):
        settings = json.loads((folder / name).read_text()) | ({"fps": 4} if "/" in name else {})
        (tmp_path / name).write_text(json.dumps(settings))
    row = asked({"type": "video", "path": str(folder / "clip.mp4")}, text("?"))
    (sample,) = load([row], kind, tokenizer, tmp_path)
    (place,) = sample["images"].places
    assert (place.frames, place.interval, place.per_second) == (6, 0.5, PER_SECOND)
