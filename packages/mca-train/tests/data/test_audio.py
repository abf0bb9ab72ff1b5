"""Rows with audio become the samples that the checkpoint's own processor makes of them."""

import base64
import json
import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_samples import ANSWER, asked, text

from mca_config.errors import McaError
from mca_models.megatron.features.sequence_media import join_tensors
from mca_train.data.audio_files import AudioFile
from mca_train.data.image_rows import ImageReader
from mca_train.data.row_paths import RowPaths
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_stream, load_tokenized

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")
from drawn_audio import AUDIO_MARKS, RATE, audio_tokenizer, extractor, tone, write  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def tokenizer():
    return audio_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two clips, others that cannot be used, and a feature extractor."""
    folder = tmp_path_factory.mktemp("clips")
    write(folder / "low.wav", 440, 0.5)
    write(folder / "high.flac", 1200, 1.25)
    write(folder / "long.wav", 440, 2.5)
    write(folder / "short.wav", 440, 0.01)
    (folder / "broken.wav").write_bytes(b"no sound")
    extractor().save_pretrained(folder / "model")
    return folder


def load(rows, tokenizer, folder, model="qwen2_audio", kind="sft", stream=False, **others):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    audio = {"d_model": 16, "encoder_ffn_dim": 64} if model == "voxtral" else {}
    vision = {"audio_token_index": tokenizer.convert_tokens_to_ids(AUDIO_MARKS[1]), "audio_config": audio}
    config = SimpleNamespace(model_type=model, vision_fields=vision if model != "llama" else None)
    directory = folder / ("asr" if model == "qwen3_asr" else "model")
    images = ImageReader(config=config, directories=(directory,))
    given = TASKS[kind].data_arguments(model_name_or_path="m", streaming=stream, **others)
    if stream:
        return list(load_stream(TASKS[kind], [str(file)], tokenizer, given, seed=None, images=images))
    return load_tokenized(TASKS[kind], [str(file)], tokenizer, given, images=images)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_spectrograms_are_those_of_the_models_processor(stream, tokenizer, folder):
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    row = asked({"type": "audio", "path": "low.wav"}, text(" or "), {"type": "audio", "audio": "high.flac"})
    (sample,) = load([row], tokenizer, folder, stream=stream)
    mark = "".join(AUDIO_MARKS)
    said = f"<|im_start|>user\n{mark} or {mark}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    clips = [soundfile.read(folder / name, dtype="float32")[0] for name in ("low.wav", "high.flac")]
    whole = Qwen2AudioProcessor(extractor(), tokenizer, chat_template=tokenizer.chat_template)
    right = whole(text=[said], audio=clips, sampling_rate=RATE, return_tensors="pt")
    assert sample["input_ids"].tolist() == right["input_ids"][0].tolist()
    made = sample["images"].tensors()
    assert torch.equal(made["input_features"], right["input_features"])
    assert torch.equal(made["feature_attention_mask"], right["feature_attention_mask"])
    assert [(place.medium, place.tokens) for place in sample["images"].places] == [
        ("audio", 12),
        ("audio", 31),
    ]
    assert tokenizer.decode(sample["input_ids"][sample["labels"] != -100]) == "red<|im_end|>\n"


@pytest.mark.parametrize("samples", [1600, 48 * 160 + 1, 120 * 160, 40 * 16000 + 159])
def test_clips_of_any_length_are_those_of_qwen3_asr(samples, tokenizer, folder):
    """A last frame that is begun is left out, and a clip may be longer than thirty seconds."""
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    own = Qwen3ASRFeatureExtractor()
    own.save_pretrained(folder / "asr")
    soundfile.write(folder / "any.wav", tone(440, samples / RATE)[:, 0], RATE)
    row = asked({"type": "audio", "path": "any.wav"}, text("?"))
    (sample,) = load([row], tokenizer, folder, model="qwen3_asr")
    clip = soundfile.read(folder / "any.wav", dtype="float32")[0]
    assert len(clip) == samples
    given = {"sampling_rate": RATE, "padding": True, "return_attention_mask": True, "return_tensors": "pt"}
    right = own([clip], **given)
    frames = int(right["attention_mask"].sum())
    made = sample["images"].tensors()
    assert torch.equal(made["input_features"], right["input_features"])
    assert made["input_features_mask"].sum() == frames
    (place,) = sample["images"].places
    assert place.tokens == frames // 100 * 13 + -(-(frames % 100) // 8)


@pytest.mark.parametrize("seconds", [0.5, 2.0, 5.3])
def test_windows_of_voxtral_are_those_of_its_processor(seconds, tokenizer, folder):
    """The spectrogram is of the full clip, and all frames of its windows count."""
    from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

    write(folder / "windows.wav", 440, seconds)
    row = asked({"type": "audio", "path": "windows.wav"}, text("?"))
    (sample,) = load([row], tokenizer, folder, model="voxtral")
    clip = soundfile.read(folder / "windows.wav", dtype="float32")[0]
    given = VoxtralProcessor.audio_kwargs | {"pad_to_multiple_of": 2 * RATE, "max_source_positions": 200}
    right = VoxtralProcessor._retrieve_input_features(
        SimpleNamespace(feature_extractor=extractor()), [clip], **given
    )
    made = sample["images"].tensors()
    assert list(made) == ["input_features"]
    assert torch.equal(made["input_features"], right)
    windows = -(-int(seconds * RATE) // (2 * RATE))
    assert right.shape == (windows, 8, 200)
    assert [place.tokens for place in sample["images"].places] == [windows * 25]


@pytest.mark.parametrize("seconds", [0.5, 2.0, 5.3])
@pytest.mark.parametrize("model", ["audioflamingo3", "glmasr"])
def test_windows_with_masks_are_those_of_the_models_processor(model, seconds, tokenizer, folder):
    from transformers.models.audioflamingo3.processing_audioflamingo3 import AudioFlamingo3Processor
    from transformers.models.glmasr.processing_glmasr import GlmAsrProcessor

    write(folder / "windows.wav", 440, seconds)
    row = asked({"type": "audio", "path": "windows.wav"}, text("?"))
    (sample,) = load([row], tokenizer, folder, model=model)
    processor = {"audioflamingo3": AudioFlamingo3Processor, "glmasr": GlmAsrProcessor}[model]
    whole = processor(extractor(), tokenizer, audio_token=AUDIO_MARKS[1])
    mark = "".join(AUDIO_MARKS)
    said = f"<|im_start|>user\n{mark}?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    clip = soundfile.read(folder / "windows.wav", dtype="float32")[0]
    right = whole(text=[said], audio=[clip], sampling_rate=RATE)
    assert sample["input_ids"].tolist() == right["input_ids"][0].tolist()
    made = sample["images"].tensors()
    assert torch.equal(made["input_features"], right["input_features"])
    assert torch.equal(made["input_features_mask"], right["input_features_mask"])


def test_a_clip_of_more_windows_than_the_processor_takes_is_not_cut_silently(tokenizer, folder):
    write(folder / "windows.wav", 440, 40.5)
    row = asked({"type": "audio", "path": "windows.wav"}, text("?"))
    with pytest.raises(McaError, match=r"lasts 40.5 seconds, and the model hears at most 40; cut it"):
        load([row], tokenizer, folder, model="audioflamingo3")


def in_base64(folder):
    return base64.b64encode((folder / "low.wav").read_bytes()).decode()


FORMS = {
    "path": lambda folder: asked({"type": "audio", "path": "low.wav"}, text("what?")),
    "url": lambda folder: asked({"type": "audio", "audio_url": str(folder / "low.wav")}, text("what?")),
    "openai": lambda folder: asked(
        {"type": "input_audio", "input_audio": {"data": in_base64(folder), "format": "wav"}}, text("what?")
    ),
    "qwen-parts": lambda folder: asked({"audio": "low.wav"}, {"text": "what?"}),
    "trl-parts": lambda folder: {**asked({"type": "audio"}, text("what?")), "audios": ["low.wav"]},
    "trl-text": lambda folder: {
        "prompt": [{"role": "user", "content": "what?"}],
        "completion": [ANSWER],
        "audio": "low.wav",
    },
    "llama-factory": lambda folder: {
        "conversations": [{"from": "human", "value": "<audio>what?"}, {"from": "gpt", "value": "red"}],
        "audios": ["low.wav"],
    },
    "ms-swift": lambda folder: {
        "messages": [{"role": "user", "content": "<audio>what?"}, ANSWER],
        "audios": ["low.wav"],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_makes_the_same_sample(form, tokenizer, folder):
    (sample,), (right,) = (load([FORMS[name](folder)], tokenizer, folder) for name in (form, "path"))
    assert torch.equal(sample["input_ids"], right["input_ids"])
    made, same = sample["images"].tensors(), right["images"].tensors()
    assert all(torch.equal(made[name], same[name]) for name in same)


WRONG = {
    r"audio .*nowhere.wav is not there": asked({"type": "audio", "path": "nowhere.wav"}),
    r"audio .*broken.wav cannot be read by soundfile: ": asked({"type": "audio", "path": "broken.wav"}),
    r"audio .*high.flac: it lasts 1.2 seconds, more than audio_max_seconds 1; cut it": asked(
        {"type": "audio", "path": "high.flac"}
    ),
    r"audio .*short.wav: it lasts 0.010 seconds, too short for one token": asked(
        {"type": "audio", "path": "short.wav"}
    ),
    r"2 placeholders of audios .* but 1 audio; their": {
        **asked({"type": "audio"}, {"type": "audio"}),
        "audios": ["low.wav"],
    },
    r"an audio clip in base64, 'no base64'..., cannot": asked({"type": "audio", "base64": "no base64"}),
    r"a part of a message has an audio clip and a text": asked({"audio": "low.wav", "text": "?"}),
    r"an audio clip has audio_start, which mca does not support": asked(
        {"type": "audio", "audio": "low.wav", "audio_start": 1}
    ),
    r"a turn of the user has <audio>, the placeholder of an audio clip, .* no column audios or audio;": {
        "messages": [{"role": "user", "content": "<audio>?"}, ANSWER],
    },
    r"the text contains the audio placeholder .*, but the row has no audio": asked(text(AUDIO_MARKS[1])),
    r"the path of an audio clip is empty": asked({"type": "audio", "path": ""}),
    r"an audio clip is 3; expected a path, a URL": {**asked({"type": "audio"}), "audios": [3]},
    r"a qwen2_audio model does not support videos": asked({"type": "video", "video": ["a.png"]}),
}


@pytest.mark.parametrize("reported", WRONG)
def test_an_invalid_row_raises_one_line(reported, tokenizer, folder):
    if "videos" in reported:
        pytest.importorskip("av")
        write_picture(folder / "a.png")
    with pytest.raises(McaError, match=f"^train_file, row 0: {reported}") as caught:
        load([WRONG[reported]], tokenizer, folder, audio_max_seconds=1)
    assert "\n" not in str(caught.value)


def write_picture(path):
    from drawn_images import draw

    draw(path, 16, 16)


def test_a_clip_longer_than_the_window_is_not_cut_silently(tokenizer, folder):
    row = asked({"type": "audio", "path": "long.wav"}, text("?"))
    with pytest.raises(
        McaError, match=r"long.wav: it lasts 2.5 seconds, and the model hears at most 2; cut it"
    ):
        load([row], tokenizer, folder)


def test_rows_of_a_dataset_open_no_other_files():
    paths = RowPaths("hf://datasets/org/name", ("hf://datasets/org/name",))
    for outside in ("../other/a.wav", "/etc/a.wav", "https://host/a.wav", "file:///etc/a.wav"):
        with pytest.raises(McaError, match=r"^audio .* (is outside of|begins with file://)"):
            AudioFile.read(outside, paths)
    assert AudioFile.read("clips/a.wav", paths).place == "hf://datasets/org/name/clips/a.wav"


def test_other_rates_and_channels_are_resampled_and_averaged(tmp_path):
    write(tmp_path / "stereo.wav", 440, 0.5, 44100, 2)
    found = AudioFile(str(tmp_path / "stereo.wav")).samples(RATE)
    right = tone(440, 0.5)[:, 0] / 2
    assert found.shape == right.shape and found.dtype == np.float32
    inside = slice(200, -200)  # the filter rings at both ends
    assert np.abs(found - right)[inside].max() < 1e-3  # 16-bit samples, and the filter's ripple


def test_a_file_that_changed_is_named_when_a_batch_is_made(tokenizer, folder):
    write(folder / "later.wav", 440, 1.0)
    (sample,) = load([asked({"type": "audio", "path": "later.wav"}, text("?"))], tokenizer, folder)
    whole = (folder / "later.wav").read_bytes()
    (folder / "later.wav").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(McaError, match=r"^train_file, row 0: audio .*later.wav"):
        sample["images"].tensors()
    write(folder / "later.wav", 440, 0.5)
    with pytest.raises(McaError, match=r"later.wav had 1 x 25 tokens .* and has 1 x 12 now"):
        sample["images"].tensors()


def test_samples_that_are_no_numbers_are_named_when_a_batch_is_made(tokenizer, folder):
    """The loss would be NaN without a hint of the row."""
    samples = np.zeros(16000, np.float32)
    samples[[5, 900]] = np.nan, np.inf
    soundfile.write(folder / "nan.wav", samples, 16000, subtype="FLOAT")
    (sample,) = load([asked({"type": "audio", "path": "nan.wav"}, text("?"))], tokenizer, folder)
    with pytest.raises(
        McaError, match=r"^train_file, row 0: audio .*nan.wav: 2 of 16000 samples are infinite or"
    ):
        sample["images"].tensors()


def test_clips_can_be_read_after_a_fork(folder):
    """Workers of a loader are forked from a process that may have read clips itself."""
    AudioFile(str(folder / "low.wav")).samples(8000)
    worker = multiprocessing.get_context("fork").Process(
        target=lambda: AudioFile(str(folder / "low.wav")).samples(8000)
    )
    worker.start()
    worker.join(60)
    worker.kill()
    worker.join()
    assert worker.exitcode == 0


def test_models_and_kinds_without_audio_say_so(tokenizer, folder):
    row = asked({"type": "audio", "path": "low.wav"}, text("?"))
    with pytest.raises(McaError, match="is an audio clip, which needs a model with a tower"):
        load([row], tokenizer, folder, model="llama")
    with pytest.raises(McaError, match="is an audio clip, which needs a model with a tower"):
        load([{**row, "label": "a"}], tokenizer, folder, kind="classify", num_labels=2, model="llama")


def test_inputs_of_samples_with_different_media_are_joined_and_padded():
    clips = {"input_features": torch.ones(1, 2, 3), "mask": torch.ones(1, 3)}
    longer = {"input_features": torch.ones(2, 2, 5), "mask": torch.ones(2, 5)}
    found = join_tensors([clips, {"pixel_values": torch.ones(4, 6)}, longer])
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        "input_features": (3, 2, 5),
        "mask": (3, 5),
        "pixel_values": (4, 6),
    }
    assert found["mask"].sum(1).tolist() == [3, 5, 5]
