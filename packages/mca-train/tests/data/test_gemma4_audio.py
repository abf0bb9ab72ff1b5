"""Clips in rows for Gemma 4 become the samples that its own processors make of them."""

import json
from types import SimpleNamespace

import pytest
import torch
from gemma4_processors import gemma4_processors, gemma4_tokenizer, token_ids

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments
from mca_train.data.image_rows import ImageReader
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_tokenized

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")
from drawn_audio import write  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")
MODELS = ("gemma4", "gemma4_unified")
RATE = 16_000


def load(model_type, folder, *names):
    tokenizer = gemma4_tokenizer()
    own = gemma4_processors(model_type, tokenizer)
    own.whole.feature_extractor.save_pretrained(folder / "model")
    ids = token_ids(tokenizer)
    config = SimpleNamespace(model_type=model_type, vision_fields={**ids, "audio_config": {}})
    turns = [
        {"role": "user", "content": "<audio>" * len(names) + "?"},
        {"role": "assistant", "content": "red"},
    ]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": turns, "audios": list(names)}))
    images = ImageReader(config=config, directories=(folder / "model",))
    given = DataArguments(model_name_or_path="m")
    rows = load_tokenized(TASKS["sft"], [str(folder / "rows.jsonl")], tokenizer, given, images=images)
    return rows, tokenizer, own.whole


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("seconds", [0.0301, 0.05007, 0.5, 1.1])
def test_tokens_and_features_are_those_of_the_models_processor(model_type, seconds, tmp_path):
    for name, length in (("one", 0.4), ("other", seconds)):
        write(tmp_path / f"{name}.wav", 440, length, rate=RATE)
    rows, tokenizer, whole = load(model_type, tmp_path, "one.wav", "other.wav")
    sample = rows[0]
    clips = [soundfile.read(tmp_path / f"{name}.wav", dtype="float32")[0] for name in ("one", "other")]
    said = "<|im_start|>user\n<|audio|><|audio|>?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    right = whole(text=[said], audio=clips, return_tensors="pt")
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.decode(right["input_ids"][0])
    made, mask = sample["images"].tensors(), right["input_features_mask"]
    length = made["input_features"].shape[1]
    assert torch.equal(made["input_features"], right["input_features"][:, :length])
    assert torch.equal(made["input_features_mask"], mask[:, :length]) and not mask[:, length:].any()
    assert made["input_features_mask"].dtype is torch.bool


def test_a_clip_that_is_longer_than_gemma4_hears_is_refused(tmp_path):
    write(tmp_path / "long.wav", 440, 30.5, rate=RATE)
    with pytest.raises(McaError, match=r"it lasts 30\.5 seconds, and the model hears at most 30"):
        load("gemma4", tmp_path, "long.wav")
