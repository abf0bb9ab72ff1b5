"""Rows of Qwen's omni models become the samples that the checkpoint's own processor makes of them."""

import json
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from drawn_images import MARKS, draw, processor
from image_samples import asked, text

from mca_models.images import positions
from mca_train.data.image_rows import ImageReader
from mca_train.tasks.load import load_tokenized
from mca_train.tasks.table import TASKS

av = pytest.importorskip("av")
pytest.importorskip("torchvision")
from drawn_videos import VIDEO_MARK, video_processor, video_tokenizer, write  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")

KINDS = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}
AUDIO_MARKS = ("<|audio_start|>", "<|AUDIO|>", "<|audio_end|>")
PER_SECOND = 13
PATCH = {"qwen2_5_omni": 14, "qwen3_omni_moe": 16}
DEFAULT_FPS = {"qwen2_5_omni": 2, "qwen3_omni_moe": 1}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = video_tokenizer()
    tokenizer.add_tokens(list(AUDIO_MARKS), special_tokens=True)
    names = dict(zip(("vision_bos", "image", "vision_eos"), MARKS, strict=True)) | {"video": VIDEO_MARK}
    names |= dict(zip(("audio_bos", "audio", "audio_eos"), AUDIO_MARKS, strict=True))
    for name, mark in names.items():
        setattr(tokenizer, f"{name}_token", mark)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(mark))
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    write(folder / "clip.mp4", 12, 4)
    write(folder / "long.mkv", 23, 5, 24, 16)
    draw(folder / "wide.png", 24, 16)
    processor().save_pretrained(folder)
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


def whole_processor(kind, tokenizer):
    """The processor of transformers, without torchvision's images."""
    home = import_module(f"transformers.models.{kind}.processing_{kind}")

    class Processor(getattr(home, f"{KINDS[kind]}Processor")):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    return Processor(
        image_processor=processor(),
        tokenizer=tokenizer,
        video_processor=video_processor("qwen2_5_omni", patch_size=PATCH[kind]),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=8),
        chat_template=tokenizer.chat_template,
    )


def expected(kind, tokenizer, said, files, **options):
    videos, known = [], []
    for file in files:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
            known.append({"total_num_frames": len(frames), "fps": float(stream.average_rate)})
        videos.append(frames)
    return whole_processor(kind, tokenizer)(
        text=[said], videos=videos, video_metadata=known, return_tensors="pt", **options
    )


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
