"""Rows of Qwen's omni models become the samples that the checkpoint's own processor makes of them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from drawn_images import MARKS, draw, processor
from image_samples import asked, text
from PIL import Image

from mca_config.errors import McaError
from mca_models.media import positions
from mca_train.data.image_rows import ImageReader
from mca_train.data.row_paths import RowPaths
from mca_train.data.video_files import open_video
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_tokenized

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


def their_positions(kind, config, right, *, sound=False):
    """Return transformers' positions for what its processor made; ``sound``: with the sound of videos."""
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
        use_audio_in_video=sound,
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


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_image_of_a_video_that_is_a_list_is_seen(kind, sound, tokenizer, folder):
    frames = [f"{number}.png" for number in range(12)]
    for name in frames:
        draw(folder / name, 24, 16)
    options = {"use_audio_in_video": True} if sound else {}
    (sample,) = load([asked({"type": "video", "video": frames})], kind, tokenizer, folder, **options)
    assert len(sample["images"].tensors()["image_grid_thw"]) == len(frames) // 2


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
def test_the_sound_of_a_single_video_is_no_option(key, tokenizer, folder):
    row = asked({"type": "video", "path": "clip.mp4", key: True})
    with pytest.raises(
        McaError,
        match=f"a video has {key}, which mca does not support per video; remove it, and set use_audio_in",
    ):
        load([row], "qwen2_5_omni", tokenizer, folder)
    (sample,) = load(
        [asked({"type": "video", "path": "clip.mp4", key: False})], "qwen2_5_omni", tokenizer, folder
    )
    assert sample["images"].tokens


SOUNDS = {"longer": 9.3, "shorter": 3.1, "equal": 6.0, "early": 2.4}
"""Seconds of the sound of videos of 6 seconds, the first of 12."""


@pytest.fixture(scope="module")
def sounding(folder):
    for name, seconds in SOUNDS.items():
        write(folder / f"{name}.mkv", 48 if name == "longer" else 24, 4, sound=tone(seconds))
    return folder


@pytest.mark.parametrize("fps", [None, 0.5, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_videos_with_sound_are_those_of_the_processor(kind, fps, tokenizer, sounding):
    """Frames and sound alternate, next to a separate clip; at half a frame per second one frame is long."""
    parts = [
        {"type": "video", "path": "longer.mkv"},
        {"type": "audio", "path": "short.wav"},
        {"type": "video", "path": "shorter.mkv"},
        {"type": "video", "path": "equal.mkv"},
        {"type": "video", "path": "early.mkv"},
    ]
    options = {} if fps is None else {"video_fps": fps}
    (sample,) = load(
        [asked(*parts)], kind, tokenizer, sounding, use_audio_in_video=True, seq_length=8192, **options
    )
    seen, heard = MARKS[0] + VIDEO_MARK + MARKS[2], "".join(AUDIO_MARKS)
    said = (
        f"<|im_start|>user\n{seen}{heard}{seen}{seen}{seen}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    )
    right = expected(
        kind,
        tokenizer,
        said,
        [sounding / f"{name}.mkv" for name in SOUNDS],
        audio=[tone(each) for each in (SOUNDS["longer"], CLIPS["short"], *list(SOUNDS.values())[1:])],
        audio_from_video_indices=[0, None, 1, 2, 3],
        load_audio_from_video=True,
        position_id_per_seconds=PER_SECOND,
        do_sample_frames=True,
        fps=fps or DEFAULT_FPS[kind],
    )
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.decode(right["input_ids"][0])
    made, places = sample["images"].tensors(), sample["images"].places
    assert torch.equal(made["pixel_values"], right["pixel_values_videos"])
    kept, theirs = (torch.as_tensor(x["feature_attention_mask"]).bool() for x in (made, right))
    assert kept.sum(1).tolist() == theirs.sum(1).tolist() == [930, 43, 310, 600, 240]
    if kind == "qwen2_5_omni":
        assert torch.equal(made["input_features"], right["input_features"])
    found = torch.from_numpy(positions(len(sample["input_ids"]), places))
    where = their_positions(kind, model_config(kind, tokenizer), right, sound=True)
    assert torch.equal(found.to(where.dtype), where)
    assert len({place.origin for place in places}) == 5 and len(places) > 8


def test_a_video_without_sound_is_its_frames(tokenizer, sounding):
    write(sounding / "silent.mp4", 12, 4)
    parts = [{"type": "video", "path": "equal.mkv"}, {"type": "video", "path": "silent.mp4"}]
    (both,) = load([asked(*parts)], "qwen3_omni_moe", tokenizer, sounding, use_audio_in_video=True)
    (plain,) = load([asked(parts[1])], "qwen3_omni_moe", tokenizer, sounding)
    assert both["images"].places[-1].origin is None
    assert both["images"].places[-1].tokens == plain["images"].tokens
    tail = len(plain["input_ids"]) - 17  # its marks, and what follows
    assert list(both["input_ids"][-tail:]) == list(plain["input_ids"][-tail:])


def test_compressed_sound_has_the_length_of_its_container(tokenizer, sounding):
    with av.open(str(sounding / "packed.mp4"), "w") as container:
        stream, heard = container.add_stream("libx264", rate=4), container.add_stream("aac", rate=44100)
        stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
        for _ in range(8):
            image = av.VideoFrame.from_ndarray(np.zeros((16, 24, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(image))
        container.mux(stream.encode())
        frame = av.AudioFrame.from_ndarray(tone(2.3)[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = RATE, 0
        resampler = av.AudioResampler(format="fltp", layout=heard.layout, rate=44100)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(heard.encode(part))
        container.mux(heard.encode())
    row = asked({"type": "video", "path": "packed.mp4"})
    (sample,) = load([row], "qwen3_omni_moe", tokenizer, sounding, use_audio_in_video=True)
    found = sample["images"].tensors()["input_features"]
    assert found.shape[-1] == pytest.approx(230, abs=1) and found.std() > 0.1
    video = open_video(str(sounding / "packed.mp4"), RowPaths(), lambda: 2.0)
    facts = video.facts(sound=True).sound
    heard = video.sound(RATE)
    assert len(heard) == facts.frames_at(RATE) == pytest.approx(2.3 * RATE, abs=2)
    close = np.corrcoef(heard[2000:-2000], tone(2.3)[2000 : len(heard) - 2000])[0, 1]
    assert close > 0.95  # neither early nor late
    facts = replace(facts, frames=facts.frames + 44100)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(McaError, match="samples of its sound can be decoded"),
    ):
        patch.setattr(type(video), "facts", lambda self, *, sound=False: SimpleNamespace(sound=facts))
        video.sound(RATE)


def test_only_omni_models_use_the_sound_of_videos(tokenizer, sounding):
    file = sounding / "rows.jsonl"
    file.write_text(json.dumps(asked({"type": "video", "path": "equal.mkv"})) + "\n")
    config = model_config("qwen2_5_omni", tokenizer)
    config.model_type = "qwen2_5_vl"
    reader = ImageReader(config=config, directories=(sounding / "qwen2_5_omni", sounding))
    given = TASKS["sft"].data_arguments(model_name_or_path="m", use_audio_in_video=True)
    with pytest.raises(
        McaError, match="use_audio_in_video: a qwen2_5_vl model takes no sound between the frames"
    ):
        load_tokenized(TASKS["sft"], [str(file)], tokenizer, given, images=reader)


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
