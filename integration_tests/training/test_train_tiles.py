"""Images in tiles, or in patches of GLM, through ``mca-train sft`` with the checkpoint's own image processor.

Losses and parameters are those of transformers with its processors. `--cases all` trains all families and layouts.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cases import Case, as_params, product
from mca_models.megatron.features.media_features import join_patches
from media_runs import LAYOUTS, LEARNED, Row, adamw_losses, answer_log_prob, load_model, run_training

pytest.importorskip("torchvision")

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_vision

pytestmark = pytest.mark.ranks

MODELS = (
    "glm_ocr",
    "glmga",
    "got_ocr2",
    "idefics3",
    "lfm2_vl",
    "llava_next",
    "llava_onevision",
    "minicpmv4_6",
    "ovis2",
    "qianfan_ocr",
    "smolvlm",
)
ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("@what, before @?", ("small", "wide"), "red"),
    ("nothing to see?", (), "no"),
    ("see @", ("tall",), "blue"),
    ("@?", ("wide",), "green it is"),
)
SIZES = {"small": (16, 16), "wide": (40, 16), "tall": (16, 40)}
VOCABULARY = 300


@cache
def folder_of(model: str, root: Path) -> tuple[Path, tuple[Row, ...]]:
    """A checkpoint with its processor, images and rows about them; and transformers' inputs of the rows."""
    from drawn_images import draw
    from image_kinds import KINDS
    from PIL import Image

    folder = root / model
    folder.mkdir()
    kind, expected = KINDS[model]()
    config = tiny_vision.described(model, vocab_size=VOCABULARY)
    for key, value in kind.config.vision_fields.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    if "vocab_size" in config:  # Ovis 2 has it twice
        config["vocab_size"] = VOCABULARY
    torch.manual_seed(0)
    made = transformers.AutoModelForMultimodalLM.from_config(transformers.AutoConfig.for_model(**config))
    for part in (made, kind.tokenizer, kind.processor):
        part.save_pretrained(folder / "model")
    for number, (name, size) in enumerate(SIZES.items()):
        draw(folder / f"{name}.png", *size, colour=(60 * number, 200 - 50 * number, 90))
    inputs, lines = [], []
    for asked, names, said in ROWS:
        images = [Image.open(folder / f"{name}.png").convert("RGB") for name in names]
        inputs.append(_inputs(kind, expected, asked, images, said))
        content = asked.replace("@", "<image>")
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": turns, "images": [f"{name}.png" for name in names]}) + "\n")
    (folder / "sft.jsonl").write_text("".join(lines))
    return folder, tuple(inputs)


def _inputs(kind: Any, expected: Any, asked: str, images: list[Any], said: str) -> Row:
    """Return transformers' inputs of a row, with labels."""
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    whole = f"{prompt}{said}<|im_end|>\n"
    found: Row = {}
    if images:
        tokens, found = expected(whole, images)
        found.pop("grids", None)
        if "target_sizes" in found:
            found["pixel_values"] = join_patches(found["pixel_values"])
        if "batch_num_images" in found:
            found["batch_num_images"] = torch.tensor([len(images)])
    else:
        tokens = kind.tokenizer(whole)["input_ids"]
    ids = torch.tensor([tokens])
    if "image_grid_thw" in found:
        found["mm_token_type_ids"] = (ids == kind.config.vision_fields["image_token_id"]).int()
    answer = len(kind.tokenizer(f"{said}<|im_end|>\n")["input_ids"])
    labels = ids.masked_fill(torch.arange(len(tokens)) < len(tokens) - answer, -100)
    return {"input_ids": ids, "labels": labels, **{name: torch.as_tensor(x) for name, x in found.items()}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiles")


@pytest.mark.cases(0, always=["llava_onevision-cp2packed"])
@pytest.mark.parametrize("case", as_params(product(MODELS, tuple(LAYOUTS))))
def test_tiled_images_train_as_in_transformers(case: Case, root: Path) -> None:
    folder, rows = folder_of(case.model, root)
    model = load_model(folder / "model")
    count = sum(int((row["labels"][0, 1:] != -100).sum()) for row in rows)
    losses = adamw_losses(
        model, lambda: -torch.stack([answer_log_prob(model, row) for row in rows]).sum() / count
    )
    logs = run_training(folder, case.layout, *LAYOUTS[case.layout])
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > LEARNED
    saved = dict(load_model(folder / case.layout / "hf").named_parameters())
    errors = {name: float((saved[name] - x).detach().abs().max()) for name, x in model.named_parameters()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 2e-5, worst  # steps of AdamW divide by gradients near 0
