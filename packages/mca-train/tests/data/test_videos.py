"""Rows with videos become the samples that the checkpoint's own processor makes of them."""

import base64
import json
import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drawn_images import MARKS, draw, processor
from image_samples import ANSWER, asked, text

from mca_config.errors import McaError
from mca_models.media import positions
from mca_train.data.image_rows import ImageReader
from mca_train.data.row_paths import RowPaths
from mca_train.data.video_files import VideoFile, open_video
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_stream, load_tokenized

av = pytest.importorskip("av")
pytest.importorskip("torchvision")
from drawn_videos import (  # noqa: E402
    GLM_MARKS,
    GLM_VIDEO,
    VIDEO_MARK,
    glm_processors,
    glm_tokenizer,
    moving,
    video_processor,
    video_tokenizer,
    whole_processor,
    write,
)

pytestmark = pytest.mark.usefixtures("own_cache")

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "exaone4_5", "lfm3_vl")


@pytest.fixture(scope="module")
def tokenizer():
    return video_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two clips, pictures, files that are none, and the processors of each model."""
    folder = tmp_path_factory.mktemp("clips")
    write(folder / "clip.mp4", 12, 4)
    write(folder / "long.mkv", 23, 5, 24, 16)
    draw(folder / "wide.png", 24, 16)
    (folder / "broken.mp4").write_bytes(b"no video")
    for model in MODELS:
        processor().save_pretrained(folder / model)
        video_processor(model).save_pretrained(folder / model)
    return folder


def reader(tokenizer, folder, model="qwen2_5_vl", vision=True):
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids([*MARKS, VIDEO_MARK]), strict=True))
    config = SimpleNamespace(model_type=model, vision_fields={**ids, "vision_config": {}} if vision else None)
    return ImageReader(config=config, directories=(folder / model,))


def load(rows, tokenizer, folder, model="qwen2_5_vl", kind="sft", vision=True, stream=False, **others):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    images = reader(tokenizer, folder, model, vision)
    given = TASKS[kind].data_arguments(model_name_or_path="m", streaming=stream, **others)
    if stream:
        return list(load_stream(TASKS[kind], [str(file)], tokenizer, given, seed=None, images=images))
    return load_tokenized(TASKS[kind], [str(file)], tokenizer, given, images=images)


def expected(model, tokenizer, files, said, fps=2, **options):
    """Return transformers' inputs for ``said`` and all frames of ``files``, which it samples itself."""
    videos, known = [], []
    for file in files:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
            known.append({"total_num_frames": len(frames), "fps": float(stream.average_rate)})
        videos.append(frames)
    own = whole_processor(model, tokenizer, **options)
    return own(
        text=[said], videos=videos, video_metadata=known, do_sample_frames=True, fps=fps, return_tensors="pt"
    )


PLAIN = MARKS[0] + VIDEO_MARK + MARKS[2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_pixels_and_positions_are_those_of_the_models_processor(model, stream, tokenizer, folder):
    row = asked({"type": "video", "path": "clip.mp4"}, text(" or "), {"type": "video", "video": "long.mkv"})
    (sample,) = load([row], tokenizer, folder, model, stream=stream)
    said = f"<|im_start|>user\n{PLAIN} or {PLAIN}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    right = expected(model, tokenizer, [folder / "clip.mp4", folder / "long.mkv"], said)
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.decode(right["input_ids"][0])
    made = sample["images"].tensors()
    assert torch.equal(made["pixel_values"], right["pixel_values_videos"])
    grids = [
        [1, high, wide] for frames, high, wide in right["video_grid_thw"].tolist() for _ in range(frames)
    ]
    assert made["image_grid_thw"].tolist() == grids
    assert right["video_grid_thw"][:, 0].min() > 1
    assert tokenizer.decode(sample["input_ids"][sample["labels"] != -100]) == "red<|im_end|>\n"
    if stream or model in ("exaone4_5", "lfm3_vl"):  # which count one position for each token
        return
    import transformers

    vision = {"patch_size": 4, "num_heads": 2, "depth": 1}
    config = transformers.AutoConfig.for_model(
        model, vision_config=vision, text_config={"num_hidden_layers": 0}
    )
    with torch.device("meta"):
        theirs = transformers.AutoModel.from_config(config)
    where = theirs.get_rope_index(
        right["input_ids"],
        mm_token_type_ids=torch.as_tensor(right["mm_token_type_ids"]),
        video_grid_thw=right["video_grid_thw"],
        second_per_grid_ts=right.get("second_per_grid_ts"),
    )[0]
    found = positions(len(sample["input_ids"]), sample["images"].places)
    assert torch.equal(torch.from_numpy(found), where[:, 0])
    assert len(found) < found[0].max()


@pytest.mark.parametrize("model", ["glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga"])
def test_frames_of_glm_are_images_in_front_of_their_times(model, folder):
    tokenizer = glm_tokenizer()
    videos, whole = glm_processors(model, tokenizer)
    videos.save_pretrained(folder / model)
    processor().save_pretrained(folder / model)
    names = ("image_start_token_id", "image_token_id", "image_end_token_id")
    names += ("video_start_token_id", "video_token_id", "video_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids([*GLM_MARKS, *GLM_VIDEO]), strict=True))
    config = SimpleNamespace(model_type=model, vision_fields={**ids, "vision_config": {}})
    (folder / "glm.jsonl").write_text(
        json.dumps(
            asked({"type": "video", "path": "long.mkv"}, text("?"), {"type": "image", "path": "wide.png"})
        )
    )
    given = TASKS["sft"].data_arguments(model_name_or_path="m")
    images = ImageReader(config=config, directories=(folder / model,))
    (sample,) = load_tokenized(TASKS["sft"], [str(folder / "glm.jsonl")], tokenizer, given, images=images)
    with av.open(str(folder / "long.mkv")) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    turn = f"<|im_start|>user\n{''.join(GLM_VIDEO)}?{''.join(GLM_MARKS)}<|im_end|>\n"
    said = f"{turn}<|im_start|>assistant\nred<|im_end|>\n"
    right = whole(
        text=[said],
        images=[open_image(folder)],
        videos=[frames],
        video_metadata=[{"total_num_frames": 23, "fps": 5.0, "duration": 4.6}],
        do_sample_frames=True,
        return_tensors="pt",
    )
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.decode(right["input_ids"][0])
    made = sample["images"].tensors()
    assert torch.equal(made["pixel_values"], torch.cat([right["pixel_values_videos"], right["pixel_values"]]))
    ((frames, _, _),) = right["video_grid_thw"].tolist()
    assert len(sample["images"].places) == frames + 1 > 3
    given = TASKS["sft"].data_arguments(model_name_or_path="m", video_max_frames=4)
    images = ImageReader(config=config, directories=(folder / model,))
    (few,) = load_tokenized(TASKS["sft"], [str(folder / "glm.jsonl")], tokenizer, given, images=images)
    assert len(few["images"].places) == 3


def test_a_factor_that_only_one_backend_applies_is_refused(folder):
    from mca_train.data.patch_grids import resized_sides

    videos, _ = glm_processors("glmga", glm_tokenizer(), patch_expand_factor=2)
    with pytest.raises(McaError, match=r"^GlmgaVideoProcessor: patch_expand_factor is 2; expected 1"):
        resized_sides(videos)


def numbered(folder, *parts, **others):
    """Return mca's sample of a row of InternVL, and transformers' inputs of the two media in it."""
    from tokenizers_for_tests import byte_tokenizer
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    class Processor(InternVLProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    marks = {
        "context_image": "<IMG_CONTEXT>",
        "start_image": "<img>",
        "end_image": "</img>",
        "video": "<video>",
    }
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}<IMG_CONTEXT>"
        "{% elif part['type'] == 'video' %}<video>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.add_tokens([*marks.values()], special_tokens=True)
    for name, mark in marks.items():
        setattr(tokenizer, f"{name}_token", mark)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(mark))
    side = {"height": 16, "width": 16}
    stills, videos = GotOcr2ImageProcessorPil(size=side, max_patches=6), InternVLVideoProcessor(size=side)
    home = folder / "internvl"
    stills.save_pretrained(home)
    videos.save_pretrained(home)
    fields = {"image_token_id": tokenizer.context_image_token_id, "image_seq_length": 4, "vision_config": {}}
    config = SimpleNamespace(model_type="internvl", vision_fields=fields)
    (folder / "numbered.jsonl").write_text(json.dumps(asked(*parts)))
    given = TASKS["sft"].data_arguments(model_name_or_path="m", **others)
    images = ImageReader(config=config, directories=(home,))
    samples = load_tokenized(TASKS["sft"], [str(folder / "numbered.jsonl")], tokenizer, given, images=images)
    whole = Processor(stills, tokenizer, videos, image_seq_length=4, chat_template=tokenizer.chat_template)
    return tokenizer, samples[0], whole


def test_frames_of_internvl_are_images_behind_their_numbers(folder):
    video, still = {"type": "video", "path": "long.mkv"}, {"type": "image", "path": "wide.png"}
    tokenizer, sample, whole = numbered(folder, text("see"), video, text("?"), still)
    with av.open(str(folder / "long.mkv")) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    right = whole(
        text=["user: see<video>?<IMG_CONTEXT><|im_end|>assistant: red<|im_end|>"],
        images=[open_image(folder)],
        videos=[frames],
        video_metadata=[{"total_num_frames": 23, "fps": 5.0, "duration": 4.6}],
        do_sample_frames=True,
        fps=2,
        return_tensors="pt",
    )
    assert tokenizer.decode(sample["input_ids"]) == tokenizer.decode(right["input_ids"][0])
    assert "seeFrame1: <img>" in tokenizer.decode(sample["input_ids"])
    assert torch.equal(sample["images"].tensors()["pixel_values"], right["pixel_values"])
    placeholder = sample["input_ids"] == tokenizer.context_image_token_id
    reported = torch.zeros_like(placeholder)
    for place in sample["images"].places:
        reported[place.start : place.start + place.tokens] = True
    assert torch.equal(placeholder, reported)
    _, few, _ = numbered(folder, video, video_max_frames=3)
    assert len(few["images"].places) == 3
    with pytest.raises(McaError, match="contains the video placeholder"):
        numbered(folder, text("a <video> of what?"))


def in_base64(folder):
    return base64.b64encode((folder / "clip.mp4").read_bytes()).decode()


FORMS = {
    "path": lambda folder: asked({"type": "video", "path": "clip.mp4"}, text("what?")),
    "url": lambda folder: asked(
        {"type": "video_url", "video_url": {"url": str(folder / "clip.mp4")}}, text("what?")
    ),
    "base64": lambda folder: asked({"type": "video", "base64": in_base64(folder)}, text("what?")),
    "qwen-parts": lambda folder: asked({"video": "clip.mp4"}, {"text": "what?"}),
    "trl-parts": lambda folder: {**asked({"type": "video"}, text("what?")), "videos": ["clip.mp4"]},
    "trl-text": lambda folder: {
        "prompt": [{"role": "user", "content": "what?"}],
        "completion": [ANSWER],
        "videos": ["clip.mp4"],
    },
    "llama-factory": lambda folder: {
        "conversations": [{"from": "human", "value": "<video>what?"}, {"from": "gpt", "value": "red"}],
        "videos": ["clip.mp4"],
    },
    "ms-swift": lambda folder: {
        "messages": [{"role": "user", "content": "<video>what?"}, ANSWER],
        "videos": ["clip.mp4"],
    },
    "one": lambda folder: {**asked(text("what?")), "video": "clip.mp4"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_makes_the_same_sample(form, tokenizer, folder):
    (sample,), (right,) = (load([FORMS[name](folder)], tokenizer, folder) for name in (form, "path"))
    assert torch.equal(sample["input_ids"], right["input_ids"])
    assert sample["images"].places == right["images"].places
    made, same = sample["images"].tensors(), right["images"].tensors()
    assert all(torch.equal(made[name], same[name]) for name in same)


def test_images_and_videos_are_in_the_order_of_their_placeholders(tokenizer, folder):
    row = {
        "messages": [{"role": "user", "content": "<video> then <image>, <video>?"}, ANSWER],
        "images": ["wide.png"],
        "videos": ["clip.mp4", "long.mkv"],
    }
    (sample,) = load([row], tokenizer, folder)
    first, image, second = sample["images"].places
    assert (first.frames, image.frames, second.frames) == (3, 1, 4)
    assert first.interval == 4 and image.interval == 1
    made = sample["images"].tensors()
    of_image = processor()(images=[open_image(folder)], return_tensors="pt")["pixel_values"]
    before = first.tokens * 4
    assert torch.equal(made["pixel_values"][before : before + len(of_image)], of_image)
    assert len(made["pixel_values"]) == 4 * sample["images"].tokens


def open_image(folder):
    from PIL import Image

    return Image.open(folder / "wide.png")


def test_a_list_of_images_is_a_video_of_sampled_frames(tokenizer, folder, tmp_path):
    from PIL import Image

    names = []
    for number, frame in enumerate(moving(6)):
        Image.fromarray(frame).save(tmp_path / f"{number}.png")
        names.append(str(tmp_path / f"{number}.png"))
    (sample,) = load([asked({"type": "video", "video": names}, text("?"))], tokenizer, folder)
    assert [(place.frames, place.interval) for place in sample["images"].places] == [(3, 4)]
    right = video_processor()(videos=[moving(6)], do_sample_frames=False, return_tensors="pt")
    assert torch.equal(sample["images"].tensors()["pixel_values"], right["pixel_values_videos"])
    draw(tmp_path / "3.png", 16, 16)
    with pytest.raises(McaError, match=r"^train_file, row 0: video of 6 images.*: image 3 has another size"):
        sample["images"].tensors()


def test_images_of_a_video_have_the_size_of_its_first_even_if_that_is_not_sampled(tmp_path):
    draw(tmp_path / "first.png", 24, 16)
    draw(tmp_path / "other.png", 40, 32)
    names = [str(tmp_path / f"{name}.png") for name in ("first", "other", "first", "other")]
    video = open_video(names, RowPaths(), lambda: 2.0)
    assert video.frames([0, 2]).shape == (2, *video.images[0].size(), 3)
    with pytest.raises(McaError, match=r"image 1 has another size \(24 x 16 and 40 x 32\); make them equal$"):
        video.frames([1, 3])


def test_options_choose_frames_as_the_processor_does(tokenizer, folder):
    row = asked({"type": "video", "path": "long.mkv"}, text("?"))
    for model in ("qwen2_5_vl", "qwen3_vl"):
        for options, same in (
            ({"video_fps": 1.0}, {"fps": 1.0}),
            ({"video_max_frames": 4}, {"max_frames": 4}),
            ({"video_max_frames": 2}, {"max_frames": 2}),  # as few as are merged
            ({"video_fps": 0.1}, {"fps": 0.1}),
        ):
            (sample,) = load([row], tokenizer, folder, model, **options)
            fps = same.pop("fps", 2)
            right = expected(model, tokenizer, [folder / "long.mkv"], PLAIN, fps, **same)
            assert torch.equal(sample["images"].tensors()["pixel_values"], right["pixel_values_videos"])
    with pytest.raises(McaError, match=r"^train_file, row 0: video_max_frames is 1; expected at least 2"):
        load([row], tokenizer, folder, video_max_frames=1)
    for name in ("video_fps", "video_max_frames", "video_max_seconds"):
        with pytest.raises(McaError, match=f"^{name} is 0; expected a positive number or null"):
            load([row], tokenizer, folder, **{name: 0})


WRONG = {
    r"video .*nowhere.mp4 is not there": asked({"type": "video", "path": "nowhere.mp4"}),
    r"video .*broken.mp4 cannot be read by PyAV: ": asked({"type": "video", "path": "broken.mp4"}),
    r"video .*wide.png cannot be read by PyAV: ": asked({"type": "video", "path": "wide.png"}),
    r"video .*clip.mp4: it lasts 3.0 seconds, more than video_max_seconds 2.5; cut it": asked(
        {"type": "video", "path": "clip.mp4"}
    ),
    r"2 placeholders of videos .* but 1 video; their": {
        **asked({"type": "video"}, {"type": "video"}),
        "videos": ["clip.mp4"],
    },
    r"1 placeholder of videos .* but 0 videos": {**asked({"type": "video"}, text("?")), "videos": []},
    r"a video in base64, 'no base64'..., cannot": asked({"type": "video", "base64": "no base64"}),
    r"a part of a message has a video and a text": asked({"video": "clip.mp4", "text": "?"}),
    r"a video has fps, which mca does not support per video; remove it, and set video_fps": asked(
        {"type": "video", "video": "clip.mp4", "fps": 1}
    ),
    r"a turn of the user has <video>, the placeholder of a video, .* no column videos or video;": {
        "messages": [{"role": "user", "content": "<video>?"}, ANSWER],
    },
    r"the text contains the video placeholder .*, but the row has no video": asked(text(VIDEO_MARK)),
    r"the path of a video is empty": asked({"type": "video", "path": ""}),
    r"a video is 3; expected a path, a URL": {**asked({"type": "video"}), "videos": [3]},
}


@pytest.mark.parametrize("reported", WRONG)
def test_what_is_wrong_with_a_row_is_one_line(reported, tokenizer, folder):
    with pytest.raises(McaError, match=f"^train_file, row 0: {reported}") as caught:
        load([WRONG[reported]], tokenizer, folder, video_max_seconds=2.5)
    assert "\n" not in str(caught.value)


def test_sound_and_playlists_are_no_videos(folder, tmp_path):
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        for packet in (*stream.encode(frame), *stream.encode()):
            container.mux(packet)
    with pytest.raises(McaError, match=r"sound.mp4 has sound and no pictures"):
        VideoFile(str(tmp_path / "sound.mp4")).facts()
    clip = folder / "clip.mp4"
    for name, text_of in (
        ("list.m3u8", f"#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{clip}\n#EXT-X-ENDLIST\n"),
        ("list.ffconcat", f"ffconcat version 1.0\nfile {clip}\n"),
    ):
        (tmp_path / name).write_text(text_of)
        with pytest.raises(McaError, match=rf"{name} cannot be read by PyAV: "):
            VideoFile(str(tmp_path / name)).facts()


def test_rows_of_a_dataset_open_no_other_files():
    paths = RowPaths("hf://datasets/org/name", ("hf://datasets/org/name",))
    for outside in ("../other/a.mp4", "/etc/a.mp4", "https://host/a.mp4", "file:///etc/a.mp4"):
        with pytest.raises(McaError, match=r"^video .* (is outside of|begins with file://)"):
            open_video(outside, paths, lambda: 2.0)
    assert open_video("clips/a.mp4", paths, lambda: 2.0).place == "hf://datasets/org/name/clips/a.mp4"


def test_a_damaged_file_is_named_when_a_batch_is_made(tokenizer, folder):
    write(folder / "later.mp4", 40, 4, 32, 48)
    row = asked({"type": "video", "path": "later.mp4"}, text("?"))
    (sample,) = load([row], tokenizer, folder)
    whole = (folder / "later.mp4").read_bytes()
    start = whole.index(b"mdat")
    (folder / "later.mp4").write_bytes(
        whole[: start + 60] + bytes(len(whole) - start - 60 - 900) + whole[-900:]
    )
    with pytest.raises(McaError, match=r"^train_file, row 0: video .*later.mp4.*(damaged|cannot be read)"):
        sample["images"].tensors()
    write(folder / "later.mp4", 20, 4, 32, 48)
    with pytest.raises(McaError, match=r"later.mp4 had 10 x \d+ x \d+ tokens .* and has 5 x \d+ x \d+ now"):
        sample["images"].tensors()


def test_frames_are_counted_and_turned_as_the_container_says(tmp_path):
    write(tmp_path / "a.mp4", 9, 3)
    write(tmp_path / "a.webm", 9, 3, codec="libvpx")
    for name in ("a.mp4", "a.webm"):
        facts = VideoFile(str(tmp_path / name)).facts()
        assert (facts.frames, facts.fps, facts.height, facts.width) == (9, 3.0, 16, 24)
    frames = VideoFile(str(tmp_path / "a.mp4")).frames([0, 4, 8])
    assert np.abs(frames.astype(int) - moving(9)[[0, 4, 8]]).mean() < 12
    last, missing = VideoFile(str(tmp_path / "a.mp4")).frames([8, 10])
    assert np.array_equal(last, missing), "the container may count two more than it has"
    with pytest.raises(McaError, match="9 frames can be decoded, and frame 11 is needed"):
        VideoFile(str(tmp_path / "a.mp4")).frames([8, 11])
    turned = (tmp_path / "a.mp4").read_bytes()
    at = turned.index(b"tkhd") + 4 + 40  # of version 0: the matrix
    matrix = [0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000]
    data = b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
    upright = VideoFile("turned", turned[:at] + data + turned[at + 36 :])
    assert (upright.facts().height, upright.facts().width) == (24, 16)
    assert np.array_equal(upright.frames([4]), np.rot90(frames[1:2], -1, (1, 2)))


def test_frames_can_be_read_after_a_fork(tmp_path):
    """Workers of a loader are forked from a process that may have read frames itself."""
    path = tmp_path / "a.mp4"
    write(path, 9, 3)
    with av.open(str(path)) as container:
        next(container.decode(video=0)).to_ndarray(
            format="rgb24"
        )  # starts threads, which the worker does not have
    VideoFile(str(path)).frames([0, 1])
    worker = multiprocessing.get_context("fork").Process(target=lambda: VideoFile(str(path)).frames([0, 1]))
    worker.start()
    worker.join(60)
    worker.kill()
    worker.join()
    assert worker.exitcode == 0


def test_models_and_kinds_without_videos_say_so(tokenizer, folder):
    row = asked({"type": "video", "path": "clip.mp4"}, text("?"))
    with pytest.raises(
        McaError,
        match="row 0: a part of a message is a video, which needs a model with a tower for it; remove it",
    ):
        load([row], tokenizer, folder, vision=False)
    with pytest.raises(McaError, match="is a video, which needs a model with a tower"):
        load([{**row, "label": "a"}], tokenizer, folder, kind="classify", num_labels=2, vision=False)


def test_a_row_that_ends_within_a_video_is_left_out(tokenizer, folder, caplog):
    row = asked({"type": "video", "path": "clip.mp4"}, text("?"))
    answered = {"messages": [{"role": "user", "content": "?"}, ANSWER]}
    tail = {
        "messages": [
            *answered["messages"],
            {"role": "user", "content": row["messages"][0]["content"]},
            ANSWER,
        ]
    }
    (whole,) = load([tail], tokenizer, folder, "qwen3_vl")
    first, second, _ = whole["images"].places
    for length, kept in ((first.start, 2), (first.start + first.tokens, 1), (second.start + 1, 1)):
        assert len(load([answered, tail], tokenizer, folder, "qwen3_vl", seq_length=length)) == kept
    assert f"1 of 2 rows end within an image, video or audio clip at seq_length {length}" in caplog.text
