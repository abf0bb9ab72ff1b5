"""Images that are not cut into one grid: tiles, rows with marks, as many tokens for every image; as processors do."""

import itertools
import json
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from drawn_images import draw
from gemma4_processors import gemma4_processors, gemma4_tokenizer, token_ids
from PIL import Image
from tokenizers_for_tests import byte_tokenizer
from transformers import AyaVisionProcessor, Gemma3Processor, Llama4Processor, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from mca_config.errors import McaError, UsageError
from mca_train.batching.collate import CountedSamples, PadCollator, StepCollator
from mca_train.batching.media_batch import ImageBatching
from mca_train.config.arguments import DataArguments
from mca_train.data import image_processors
from mca_train.data.image_processors import image_tokens
from mca_train.data.image_rows import ImageReader
from mca_train.data.video_files import VideoFacts
from mca_train.data.video_tokens import PooledVideoTokens, VideoOptions
from mca_train.tasks.load import load_tokenized
from mca_train.tasks.table import TASKS

SIZES = {"small": (16, 16), "wide": (40, 16), "tall": (24, 50)}
SIDE = {"height": 16, "width": 16}


class Kind:
    """A family: its tokenizer, its image processor, and what its own processor makes of a text."""

    def __init__(self, model_type, marks, image_processor, vision, mark):
        self.tokenizer = byte_tokenizer(
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
            "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
            f"{{{{ '{mark}' }}}}"
            "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        self.tokenizer.add_tokens([*marks, "\n\n\n"], special_tokens=True)
        self.processor, self.mark = image_processor, mark
        ids = self.tokenizer.convert_tokens_to_ids(list(marks))
        self.config = SimpleNamespace(model_type=model_type, vision_fields=vision(ids))


def internvl():
    kind = Kind(
        "internvl",
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        GotOcr2ImageProcessorPil(size=SIDE, max_patches=6),
        lambda ids: {"image_token_id": ids[0], "image_seq_length": 4, "vision_config": {}},
        "<IMG_CONTEXT>",
    )

    def expected(text, images):  # its own processor needs torchvision for videos
        made = kind.processor(images=images, return_tensors="pt", crop_to_patches=True)
        for tiles in made["num_patches"]:
            text = text.replace("@", "<img>" + "<IMG_CONTEXT>" * 4 * int(tiles) + "</img>", 1)
        return kind.tokenizer(text)["input_ids"], {"pixel_values": made["pixel_values"]}

    return kind, expected


def mistral3():
    kind = Kind(
        "mistral3",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=4),
        lambda ids: {
            "image_token_index": ids[0],
            "spatial_merge_size": 2,
            "vision_config": {"patch_size": 4},
        },
        "[IMG]",
    )

    def expected(text, images):  # its own processor needs torchvision, though it reads no videos
        made = kind.processor(images=images, return_tensors="pt", patch_size={"height": 8, "width": 8})
        for high, wide in made["image_sizes"].tolist():
            rows = ["[IMG]" * (wide // 8)] * (high // 8)
            text = text.replace("@", "[IMG_BREAK]".join(rows) + "[IMG_END]", 1)
        return kind.tokenizer(text)["input_ids"], dict(made)

    return kind, expected


def gemma3():
    kind = Kind(
        "gemma3",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        Gemma3ImageProcessorPil(size=SIDE),
        lambda ids: {
            "image_token_index": ids[0],
            "boi_token_index": ids[1],
            "eoi_token_index": ids[2],
            "mm_tokens_per_image": 4,
            "vision_config": {},
        },
        "<start_of_image>",
    )
    names = ("image_token", "boi_token", "eoi_token")
    for name, mark in zip(names, ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), strict=True):
        setattr(kind.tokenizer, name, mark)
        setattr(kind.tokenizer, f"{name}_id", kind.tokenizer.convert_tokens_to_ids(mark))
    whole = Gemma3Processor(kind.processor, kind.tokenizer, image_seq_length=4)

    def expected(text, images):
        made = whole(images=[images], text=[text.replace("@", "<start_of_image>")], return_tensors="pt")
        return made["input_ids"][0].tolist(), {"pixel_values": made["pixel_values"]}

    return kind, expected


def llava():
    kind = Kind(
        "llava",
        ("<image>",),
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=SIDE),
        lambda ids: {
            "image_token_index": ids[0],
            "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
        },
        "<image>",
    )
    kind.tokenizer.image_token = "<image>"
    kind.tokenizer.image_token_id = kind.tokenizer.convert_tokens_to_ids("<image>")
    whole = LlavaProcessor(
        kind.processor,
        kind.tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )

    def expected(text, images):
        made = whole(images=images, text=[text.replace("@", "<image>")], return_tensors="pt")
        return made["input_ids"][0].tolist(), {"pixel_values": made["pixel_values"]}

    return kind, expected


def llava_next():
    grids = [[16, 32], [32, 16], [32, 32]]
    kind = Kind(
        "llava_next",
        ("<image>",),
        LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=SIDE, image_grid_pinpoints=grids),
        lambda ids: {
            "image_token_index": ids[0],
            "image_grid_pinpoints": grids,
            "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
        },
        "<image>",
    )
    kind.tokenizer.image_token = "<image>"
    kind.tokenizer.image_token_id = kind.tokenizer.convert_tokens_to_ids("<image>")
    whole = LlavaNextProcessor(
        kind.processor,
        kind.tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )

    def expected(text, images):
        made = whole(images=images, text=[text.replace("@", "<image>")], return_tensors="pt")
        pixels = {name: made[name] for name in ("pixel_values", "image_sizes")}
        return made["input_ids"][0].tolist(), pixels

    return kind, expected


def idefics(model_type="idefics3"):
    small = model_type == "smolvlm"
    images = SmolVLMImageProcessorPil if small else Idefics3ImageProcessorPil
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    kind = Kind(
        model_type,
        ("<image>", "<fake_token_around_image>", "<global-img>", *rows),
        images(size={"longest_edge": 48}, max_image_size={"longest_edge": 16}),
        lambda ids: {
            "image_token_id": ids[0],
            "scale_factor": 2,
            "vision_config": {"image_size": 16, "patch_size": 4},
        },
        "<image>",
    )
    if small:
        with pytest.MonkeyPatch.context() as patch:  # the package spells the number of a video's frames
            patch.setattr(processing_smolvlm, "num2words", str)
            patch.setattr(
                processing_smolvlm.SmolVLMProcessor, "check_argument_for_proper_class", lambda *args: object
            )
            whole = processing_smolvlm.SmolVLMProcessor(kind.processor, kind.tokenizer, None, image_seq_len=4)
    else:
        whole = Idefics3Processor(kind.processor, kind.tokenizer, image_seq_len=4)

    def expected(text, images):
        made = whole(images=[images], text=[text.replace("@", "<image>")], return_tensors="pt")
        assert made["pixel_attention_mask"].all()
        return made["input_ids"][0].tolist(), {"pixel_values": made["pixel_values"][0][:, None]}

    return kind, expected


def llama4():
    marks = ("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>")
    kind = Kind(
        "llama4",
        (*marks, "<|tile_x_separator|>", "<|tile_y_separator|>"),
        Llama4ImageProcessor(size=SIDE, max_patches=6),
        lambda ids: {"image_token_index": ids[0], "vision_config": {"image_size": 16, "patch_size": 4}},
        "<|image|>",
    )
    whole = Llama4Processor(kind.processor, kind.tokenizer, patch_size=4)

    def expected(text, images):
        made = whole(images=images, text=[text.replace("@", "<|image|>")], return_tensors="pt")
        return made["input_ids"][0].tolist(), {"pixel_values": made["pixel_values"]}

    return kind, expected


def deepseek():
    kind = Kind(
        "deepseek_vl",
        ("<image_placeholder>",),
        DeepseekVLImageProcessorPil(size=SIDE, min_size=8),
        lambda ids: {"image_token_id": ids[0], "vision_config": {"image_size": 16, "patch_size": 8}},
        "<image_placeholder>",
    )
    kind.tokenizer.image_token = "<image_placeholder>"
    whole = DeepseekVLProcessor(kind.processor, kind.tokenizer, num_image_tokens=4)

    def expected(text, images):
        made = whole(images=images, text=[text.replace("@", "<image_placeholder>")], return_tensors="pt")
        return made["input_ids"][0].tolist(), {"pixel_values": made["pixel_values"]}

    return kind, expected


def kimi():
    marks = ("<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>")
    written = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    kind = Kind(
        "kimi_k25",
        marks,
        Kimi_K25ImageProcessor(
            patch_size=4, merge_size=2, max_patches=64, size={"max_height": 8, "max_width": 8}
        ),
        lambda ids: {"image_token_id": ids[0], "vision_config": {}},
        written,
    )

    def expected(text, images):
        made = kind.processor(images=images, return_tensors="pt")
        for _, rows, columns in made["image_grid_thw"].tolist():
            text = text.replace("@", written.replace(marks[0], marks[0] * (rows * columns // 4)), 1)
        return kind.tokenizer(text)["input_ids"], dict(made)

    return kind, expected


def gemma4(model_type="gemma4"):
    tokenizer = gemma4_tokenizer()
    own = gemma4_processors(model_type, tokenizer)
    kind = Kind(model_type, (), own.images, lambda ids: token_ids(tokenizer), "<|image|>")
    kind.tokenizer, kind.videos, kind.whole = tokenizer, own.videos, own.whole
    kind.config.attention = SimpleNamespace(window_size=1024)
    kind.config.vision = SimpleNamespace(bidirectional_images=True)

    def expected(text, images):
        found = kind.whole(images=[images], text=[text.replace("@", "<|image|>")], return_tensors="pt")
        positions = found["image_position_ids"]
        most = int((positions >= 0).all(-1).sum(1).max())
        assert most < positions.shape[1]  # there is padding
        return found["input_ids"][0].tolist(), {
            "pixel_values": found["pixel_values"][:, :most],
            "image_position_ids": positions[:, :most],
        }

    return kind, expected


def aya_vision():
    kind = Kind(
        "aya_vision",
        ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
        GotOcr2ImageProcessorPil(size=SIDE, max_patches=6),
        lambda ids: {"image_token_index": ids[0], "vision_config": {"image_size": 16, "patch_size": 4}},
        "<image>",
    )
    kind.tokenizer.add_tokens(["<image>"], special_tokens=True)
    sizes = {"patch_size": 4, "img_size": 16, "downsample_factor": 2}
    whole = AyaVisionProcessor(kind.processor, kind.tokenizer, **sizes)

    def expected(text, images):
        made = whole(images=images, text=[text.replace("@", "<image>")], return_tensors="pt")
        return made["input_ids"][0].tolist(), {"pixel_values": made["pixel_values"]}

    return kind, expected


KINDS = {
    "aya_vision": aya_vision,
    "gemma4": gemma4,
    "gemma4_unified": partial(gemma4, "gemma4_unified"),
    "internvl": internvl,
    "mistral3": mistral3,
    "gemma3": gemma3,
    "llava": llava,
    "llava_next": llava_next,
    "idefics3": idefics,
    "smolvlm": partial(idefics, "smolvlm"),
    "llama4": llama4,
    "kimi_k25": kimi,
    "deepseek_vl": deepseek,
}


@pytest.fixture(params=KINDS)
def made(request, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kind, expected = KINDS[request.param]()
    kind.processor.save_pretrained(tmp_path / "model")
    for name, size in SIZES.items():
        draw(tmp_path / f"{name}.png", *size)
    return kind, expected, tmp_path


def load(kind, folder, *rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    images = ImageReader(config=kind.config, directories=(folder / "model",))
    given = DataArguments(model_name_or_path="m", seq_length=4096)
    return load_tokenized(TASKS["sft"], [str(folder / "rows.jsonl")], kind.tokenizer, given, images=images)


def row(question, *names):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "red"}]
    return {"messages": turns, "images": [f"{name}.png" for name in names]}


def test_tokens_and_pixels_are_those_of_the_familys_own_processor(made):
    kind, expected, folder = made
    sample = load(kind, folder, row("<image>and <image>\n<image>?", *SIZES))[0]
    text = "<|im_start|>user\n@and @\n@?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    ids, pixels = expected(text, [Image.open(folder / f"{name}.png").convert("RGB") for name in SIZES])
    assert sample["input_ids"].tolist() == ids
    found = sample["images"].tensors()
    assert found.keys() == pixels.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(pixels[name])) for name in pixels)
    placeholder = sample["input_ids"] == kind.tokenizer.convert_tokens_to_ids(
        {
            "internvl": "<IMG_CONTEXT>",
            "mistral3": "[IMG]",
            "aya_vision": "<|IMG_PATCH|>",
            "gemma3": "<image_soft_token>",
            "gemma4": "<|image|>",
            "gemma4_unified": "<|image|>",
            "llava": "<image>",
            "llava_next": "<image>",
            "idefics3": "<image>",
            "smolvlm": "<image>",
            "llama4": "<|patch|>",
            "kimi_k25": "<|media_pad|>",
            "deepseek_vl": "<image_placeholder>",
        }[kind.config.model_type]
    )
    reported = torch.zeros_like(placeholder)
    for place in sample["images"].places:
        reported[place.start : place.start + place.tokens] = True
    assert torch.equal(placeholder, reported)
    assert kind.tokenizer.decode(sample["input_ids"][sample["labels"] != -100]) == "red<|im_end|>\n"


def test_a_batch_joins_images_of_several_rows(made):
    kind, _, folder = made
    samples = load(kind, folder, row("<image>?", "wide"), row("none?"), row("<image>?", "tall"))
    images = ImageBatching(bidirectional="gemma" in kind.config.model_type)
    collator = StepCollator(collate=PadCollator(0), micro_batch_size=3, images=images)
    (batch,) = collator(CountedSamples(samples).__getitems__([0, 1, 2])).micro_batches
    rows = batch.feature_rows
    assert rows[rows >= 0].tolist() == [*range(batch.image_tokens)]
    assert not (rows[1] >= 0).any()
    apart = [samples[index]["images"].tensors()["pixel_values"] for index in (0, 2)]
    assert len(batch.images["pixel_values"]) == sum(map(len, apart))
    if "image_position_ids" in batch.images:
        count = (batch.images["image_position_ids"] >= 0).all(-1).sum(1)
        assert count.tolist() == [each.shape[1] for each in apart] and len(set(count.tolist())) > 1
    if images.bidirectional:
        positions = torch.arange(rows.shape[1])
        assert torch.equal(batch.attention_ends[1], positions + 1)
        (place,) = samples[0]["images"].places
        end = place.start + place.tokens
        assert batch.attention_ends[0, place.start : end].tolist() == [end] * place.tokens
        others = (rows[0] < 0).nonzero()[:, 0]
        assert torch.equal(batch.attention_ends[0, others], others + 1)


def test_a_tokenizer_without_the_marks_is_told(tmp_path, monkeypatch):
    kind, _ = mistral3()
    kind.processor.save_pretrained(tmp_path / "model")
    draw(tmp_path / "small.png", 16, 16)
    kind.tokenizer = byte_tokenizer(kind.tokenizer.chat_template)
    with pytest.raises(McaError, match=r"the tokenizer has no token \[IMG_BREAK\], \[IMG_END\]"):
        load(kind, tmp_path, row("<image>?", "small"))


def test_a_processor_is_found_where_transformers_exports_none_without_torchvision(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise ImportError("requires the Torchvision library")

    PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=4).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers, "AutoImageProcessor", SimpleNamespace(from_pretrained=refuse))
    assert isinstance(image_processors._processor([tmp_path]), PixtralImageProcessorPil)


@pytest.mark.parametrize("resized", [True, False])
def test_images_of_any_size_have_the_tiles_of_idefics(resized, tmp_path):
    kind, _ = idefics()
    kind.processor.do_resize = resized
    kind.processor.save_pretrained(tmp_path)
    tokens = image_tokens(kind.config, (tmp_path,), kind.tokenizer)
    for height, width in itertools.product((5, 8, 16, 17, 31, 40, 48, 65), repeat=2):
        made = kind.processor(images=[np.zeros((height, width, 3), np.uint8)], return_row_col_info=True)
        grid = tokens.grid(height, width)
        assert grid == tokens._made(made.data)[0], (height, width)
        assert grid.rows == len(made["pixel_values"][0])


def test_other_sizes_of_tiled_images_than_the_models_are_refused(tmp_path):
    kind, _ = llava_next()
    kind.processor.save_pretrained(tmp_path)
    kind.config.vision_fields["image_grid_pinpoints"] = [[16, 32]]
    with pytest.raises(UsageError, match=r"image_grid_pinpoints is .* but the model's .*\[\[16, 32\]\]"):
        image_tokens(kind.config, (tmp_path,), kind.tokenizer)


def test_images_whose_marks_are_not_known_are_refused_by_name():
    config = SimpleNamespace(model_type="minimax_m3_vl", vision_fields={})
    with pytest.raises(
        UsageError, match=r"minimax_m3_vl are not supported in rows.*remove the images from the rows"
    ):
        image_tokens(config, (), None)


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_frames_of_gemma4_are_behind_their_minutes_and_seconds(model_type, tmp_path, monkeypatch):
    av = pytest.importorskip("av")
    from drawn_videos import write

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kind, _ = gemma4(model_type)
    for processor in (kind.processor, kind.videos):
        processor.save_pretrained(tmp_path / "model")
    write(tmp_path / "long.mp4", 70, 1)
    draw(tmp_path / "wide.png", *SIZES["wide"])
    turns = [{"role": "user", "content": "<image>then <video>?"}, {"role": "assistant", "content": "red"}]
    sample = load(kind, tmp_path, {"messages": turns, "images": ["wide.png"], "videos": ["long.mp4"]})[0]
    with av.open(str(tmp_path / "long.mp4")) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    right = kind.whole(
        text=["<|im_start|>user\n<|image|>then <|video|>?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"],
        images=[[Image.open(tmp_path / "wide.png").convert("RGB")]],
        videos=[frames],
        video_metadata=[{"total_num_frames": 70, "fps": 1.0}],
        do_sample_frames=True,
        return_tensors="pt",
    )
    assert kind.tokenizer.decode(sample["input_ids"]) == kind.tokenizer.decode(right["input_ids"][0])
    assert "01:07 <|image><|video|>" in kind.tokenizer.decode(sample["input_ids"])
    found = sample["images"].tensors()
    assert len(found["pixel_values"]) == len(sample["images"].places) == 33
    for medium, own, suffix in (("image", slice(1), ""), ("video", slice(1, 33), "_videos")):
        positions = right[f"{medium}_position_ids"]
        most = int((positions >= 0).all(-1).sum(1).max())
        assert torch.equal(found["pixel_values"][own, :most], right[f"pixel_values{suffix}"][:, :most])
        assert torch.equal(found["image_position_ids"][own, :most], positions[:, :most])
        assert (found["image_position_ids"][own, most:] == -1).all()


def test_a_clip_with_fewer_frames_than_gemma4_takes_is_seen_as_a_whole():
    kind, _ = gemma4()
    tokens = PooledVideoTokens(kind.videos, 1, VideoOptions(), (2, 3), kind.tokenizer)
    grid = tokens.grid(VideoFacts(5, 2.0, 16, 24))
    assert (grid.frames, grid.times) == (5, (0.0, 0.5, 1.0, 1.5, 2.0))
    few = PooledVideoTokens(kind.videos, 1, VideoOptions(max_frames=4), (2, 3), kind.tokenizer)
    assert few.grid(VideoFacts(8, 2.0, 16, 24)).times == (0.0, 1.0, 2.0, 3.0)


def test_images_longer_than_the_window_of_gemma4_unified_are_refused(tmp_path):
    kind, _ = gemma4("gemma4_unified")
    kind.config.attention.window_size = 64
    kind.processor.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"max_soft_tokens is 70, more than the sliding window.*64 tokens"):
        image_tokens(kind.config, (tmp_path,), kind.tokenizer)
