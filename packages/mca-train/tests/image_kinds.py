"""Families that do not cut images into one grid: tokenizers, image processors, and what their own processors make."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from gemma4_processors import gemma4_processors, gemma4_tokenizer, token_ids
from tokenizers_for_tests import byte_tokenizer
from transformers import AyaVisionProcessor, Gemma3Processor, Llama4Processor, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glmga.image_processing_pil_glmga import GlmgaImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

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


def internvl(model_type="internvl", mark="<IMG_CONTEXT>"):
    kind = Kind(
        model_type,
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        GotOcr2ImageProcessorPil(size=SIDE, max_patches=6),
        lambda ids: {"image_token_id": ids[0], "image_seq_length": 4, "vision_config": {}},
        mark,
    )

    def expected(text, images):  # its own processor needs torchvision for videos
        made = kind.processor(images=images, return_tensors="pt", crop_to_patches=True)
        for tiles in made["num_patches"]:
            text = text.replace("@", "<img>" + "<IMG_CONTEXT>" * 4 * int(tiles) + "</img>", 1)
        return kind.tokenizer(text)["input_ids"], {"pixel_values": made["pixel_values"]}

    return kind, expected


def got_ocr2():
    kind = Kind(
        "got_ocr2",
        ("<imgpad>", "<img>", "</img>"),
        GotOcr2ImageProcessorPil(size=SIDE),
        lambda ids: {"image_token_index": ids[0], "vision_config": {"image_size": 16, "patch_size": 2}},
        "<img><imgpad></img>",
    )
    whole = GotOcr2Processor(kind.processor, kind.tokenizer)

    def expected(text, images):
        said = text.replace("@", "<img><imgpad></img>")
        made = whole(images=images, text=[said], num_image_tokens=4, return_tensors="pt")
        return made["input_ids"][0].tolist(), {"pixel_values": made["pixel_values"]}

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


def lighton_ocr():
    kind = Kind(
        "lighton_ocr",
        ("<|image_pad|>",),
        PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=4),
        lambda ids: {"image_token_id": ids[0], "spatial_merge_size": 2, "vision_config": {"patch_size": 4}},
        "<|image_pad|>",
    )

    def expected(text, images):  # its own processor needs torchvision for a function of another
        made = kind.processor(images=images, return_tensors="pt")
        for high, wide in made["image_sizes"].tolist():
            text = text.replace("@", "<|image_pad|>" * (high // 8 * (wide // 8)), 1)
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


def _llava_kind(model_type, processor, **fields):
    kind = Kind(
        model_type, ("<image>",), processor, lambda ids: {"image_token_index": ids[0], **fields}, "<image>"
    )
    kind.tokenizer.image_token = "<image>"
    kind.tokenizer.image_token_id = kind.tokenizer.convert_tokens_to_ids("<image>")
    return kind


def llava(model_type="llava"):
    kind = _llava_kind(
        model_type,
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=SIDE),
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
    )
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
    kind = _llava_kind(
        "llava_next",
        LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=SIDE, image_grid_pinpoints=grids),
        image_grid_pinpoints=grids,
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
    )
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


def llava_onevision():
    grids = [[16, 32], [32, 16], [32, 32], [64, 64]]
    kind = _llava_kind(
        "llava_onevision",
        LlavaOnevisionImageProcessorPil(size=SIDE, image_grid_pinpoints=grids),
        image_grid_pinpoints=grids,
        vision_aspect_ratio="anyres_max_2",
        vision_config={"image_size": 16, "patch_size": 4},
    )
    options = {"num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlavaOnevisionProcessor, "check_argument_for_proper_class", lambda *args: object)
        whole = LlavaOnevisionProcessor(
            kind.processor, kind.tokenizer, None, vision_feature_select_strategy="full", **options
        )

    def expected(text, images):
        made = whole(images=[images], text=[text.replace("@", "<image>")], return_tensors="pt")
        assert made["batch_num_images"].tolist() == [len(images)]
        pixels = {name: made[name] for name in ("pixel_values", "image_sizes")}
        company = {"batch_num_images": torch.full((len(images),), min(len(images), 2))}
        return made["input_ids"][0].tolist(), pixels | company

    return kind, expected


def ovis2(**options):
    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    kind = Kind(
        "ovis2",
        ("<IMG_ATOM>", *marks, "<image>"),
        Ovis2ImageProcessorPil(size=SIDE, crop_to_patches=True, max_patches=6, **options),
        lambda ids: {
            "image_token_id": ids[0],
            "visual_indicator_token_ids": ids[1:6],
            "vision_config": {"image_size": 16, "patch_size": 4, "hidden_stride": 2},
        },
        "<image>",
    )
    whole = Ovis2Processor(kind.processor, kind.tokenizer, image_seq_length=4)

    def expected(text, images):
        made = whole(images=images, text=[text.replace("@", "<image>")], return_tensors="pt")
        grids = kind.processor(images, return_tensors="pt")["grids"]
        return made["input_ids"][0].tolist(), {"pixel_values": made["pixel_values"], "grids": grids}

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


def lfm2_vl():
    rows = [f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)]
    kind = Kind(
        "lfm2_vl",
        ("<image>", "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>", *rows),
        Lfm2VlImageProcessor(
            **{"tile_size": 16, "encoder_patch_size": 4, "max_tiles": 4},
            **{"min_image_tokens": 2, "max_image_tokens": 4},
        ),
        lambda ids: {"image_token_id": ids[0], "vision_config": {}},
        "<image>",
    )
    whole = Lfm2VlProcessor(kind.processor, kind.tokenizer)

    def expected(text, images):
        made = whole(images=[images], text=[text.replace("@", "<image>")], return_tensors="pt")
        most = int(made["pixel_attention_mask"].sum(1).max())
        kept = {name: made[name][:, :most] for name in ("pixel_values", "pixel_attention_mask")}
        return made["input_ids"][0].tolist(), {**kept, "spatial_shapes": made["spatial_shapes"]}

    return kind, expected


MINICPM = {
    **{f"image_{side}_token": mark for side, mark in (("start", "<image>"), ("end", "</image>"))},
    **{f"slice_{side}_token": mark for side, mark in (("start", "<slice>"), ("end", "</slice>"))},
    **{f"image_id_{side}_token": mark for side, mark in (("start", "<image_id>"), ("end", "</image_id>"))},
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
}


class MiniCPM(MiniCPMV4_6Processor):
    """One that takes no videos unless it gets their processor, which needs torchvision."""

    def __init__(self, image_processor, video_processor=None, tokenizer=None, **options):
        videos = video_processor or SimpleNamespace(slice_mode=True, downsample_mode="16x")
        super().__init__(image_processor, videos, tokenizer, **options)

    def check_argument_for_proper_class(self, name, argument):
        return type(argument)


def minicpm(mode="16x", **options):
    kind = Kind(
        "minicpmv4_6",
        tuple(MINICPM.values()),
        MiniCPMV4_6ImageProcessorPil(scale_resolution=16, patch_size=2, max_slice_nums=6, **options),
        lambda ids: {
            **{"image_token_id": ids[-2], "video_token_id": ids[-1], "downsample_mode": mode},
            "vision_config": {"patch_size": 2},
        },
        "<|image_pad|>",
    )
    for name, mark in MINICPM.items():
        setattr(kind.tokenizer, name, mark)
    for name in ("image_token", "video_token"):
        setattr(kind.tokenizer, f"{name}_id", kind.tokenizer.convert_tokens_to_ids(MINICPM[name]))
    whole = MiniCPM(kind.processor, tokenizer=kind.tokenizer)

    def expected(text, images):
        made = whole(
            images=[images],
            text=[text.replace("@", "<|image_pad|>")],
            return_tensors="pt",
            downsample_mode=mode,
        )
        patches = made["pixel_values"][0].unflatten(2, (-1, 2)).permute(2, 0, 1, 3)
        return made["input_ids"][0].tolist(), {
            "pixel_values": patches,
            "target_sizes": made["target_sizes"],
        }

    return kind, expected


def glm(model_type, images=Glm4vImageProcessorPil):
    kind = Kind(
        model_type,
        ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"),
        images(patch_size=4, merge_size=2, size={"shortest_edge": 4 * 64, "longest_edge": 16 * 64}),
        lambda ids: {
            **{"image_token_id": ids[0], "image_start_token_id": ids[1], "image_end_token_id": ids[2]},
            **{"video_token_id": ids[3], "vision_config": {}},
        },
        "<|begin_of_image|><|image|><|end_of_image|>",
    )

    def expected(text, images):  # its own processor needs torchvision for videos
        made = kind.processor(images=images, return_tensors="pt")
        for patches in made["image_grid_thw"].prod(1).tolist():
            marked = "<|begin_of_image|>" + "<|image|>" * (patches // 4) + "<|end_of_image|>"
            text = text.replace("@", marked, 1)
        return kind.tokenizer(text)["input_ids"], dict(made)

    return kind, expected


KINDS = {
    "aya_vision": aya_vision,
    "glm_ocr": partial(glm, "glm_ocr"),
    "glmga": partial(glm, "glmga", GlmgaImageProcessorPil),
    "gemma4": gemma4,
    "gemma4_unified": partial(gemma4, "gemma4_unified"),
    "internvl": internvl,
    "got_ocr2": got_ocr2,
    "qianfan_ocr": partial(internvl, "qianfan_ocr", "<image>"),
    "mistral3": mistral3,
    "lighton_ocr": lighton_ocr,
    "gemma3": gemma3,
    "llava": llava,
    "vipllava": partial(llava, "vipllava"),
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "idefics3": idefics,
    "smolvlm": partial(idefics, "smolvlm"),
    "lfm2_vl": lfm2_vl,
    "minicpmv4_6": minicpm,
    "minicpmv4_6-4x": partial(minicpm, "4x"),
    "ovis2": ovis2,
    "llama4": llama4,
    "kimi_k25": kimi,
    "deepseek_vl": deepseek,
}
