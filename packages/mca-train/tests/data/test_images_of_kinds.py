"""Images beside sft in memory: in streams, in texts of pretrain, in pairs of dpo, in prompts of kto."""

import json
from types import SimpleNamespace

import pytest
import torch
from drawn_images import MARKS, image_token, image_tokenizer
from image_samples import ANSWER, asked, load, placed, streamed, text

from mca_config.errors import McaError
from mca_models.megatron.features.sequence_media import MediaJoiner
from mca_train.batching.collate import PadCollator, StepCollator
from mca_train.config.arguments import ClassifyArguments
from mca_train.run.inputs import load_tokenizer
from mca_train.trainer.kto import KtoKlPairs

pytestmark = pytest.mark.usefixtures("own_cache")


ROW = asked({"type": "image", "path": "wide.png"}, text("what?"))


def test_a_stream_gives_the_same_samples(tokenizer, folder, caplog):
    rows = [ROW, asked(text("none?")), ROW, ROW]
    expected, found = load(rows, tokenizer, folder), streamed(rows, tokenizer, folder)
    assert len(found) == len(expected) == 4
    for mine, its in zip(found, expected, strict=True):
        assert mine.keys() == its.keys()
        assert torch.equal(mine["input_ids"], its["input_ids"])
        assert torch.equal(mine["labels"], its["labels"])
    assert placed(found[2]) == placed(expected[2])
    assert torch.equal(
        found[2]["images"].tensors()["pixel_values"], expected[2]["images"].tensors()["pixel_values"]
    )
    long = asked(text("a" * 30), {"type": "image", "path": "wide.png"})
    within = placed(load([long], tokenizer, folder)[0])[0][0] + 2
    cut = streamed([long, asked(text("none?"))], tokenizer, folder, seq_length=within)
    assert len(cut) == 1
    assert "images" not in cut[0]
    assert f"do not have an answer within seq_length {within} and are left out: 1 of 2 rows" in caplog.text
    far = asked(text("a" * 64 * (within + 80)), {"type": "image", "path": "wide.png"})
    far["messages"] = [*asked(text("none?"))["messages"], *far["messages"]]
    for made in (
        load([far], tokenizer, folder, seq_length=within),
        streamed([far], tokenizer, folder, seq_length=within),
    ):
        assert len(made[0]["input_ids"]) == within, "the image is behind what is tokenized of the row"
        assert "images" not in made[0]
    (folder / "gone.png").write_bytes((folder / "wide.png").read_bytes())
    late = streamed([asked({"type": "image", "path": "gone.png"})], tokenizer, folder)
    (folder / "gone.png").unlink()
    with pytest.raises(McaError, match=r"^train_file, row 0: image .*gone.png is not there"):
        late[0]["images"].tensors()


TEXTS = [
    {"text": "see <image>, and <image> too", "images": ["small.png", "wide.png"]},
    {"text": "nothing but words", "images": []},
    {"text": "<image>", "images": ["wide.png"]},
]


@pytest.mark.parametrize("length", [400, 24, 9])
def test_blocks_of_texts_hold_images_whole(length, tokenizer, folder):
    blocks = load(TEXTS, tokenizer, folder, kind="pretrain", seq_length=length)
    whole = torch.cat([blocks[index]["input_ids"] for index in range(len(blocks))])
    image = {pads: f"{MARKS[0]}{MARKS[1] * pads}{MARKS[2]}" for pads in (4, 6)}
    said = f"see {image[4]}, and {image[6]} too<|eos|>nothing but words<|eos|>{image[6]}<|eos|>"
    assert tokenizer.decode(whole) == said
    assert max(blocks.lengths) <= length
    sizes = {4: [1, 4, 4], 6: [1, 4, 6]}
    found = []
    for index in range(len(blocks)):
        block = blocks[index]
        pads = block["input_ids"] == image_token(tokenizer)
        assert torch.equal(block["labels"] == -100, pads)
        if not pads.any():
            assert "images" not in block
            continue
        places = block["images"].places
        assert sum(place.tokens for place in places) == int(pads.sum())
        assert all(pads[place.start : place.start + place.tokens].all() for place in places)
        grids = block["images"].tensors()["image_grid_thw"].tolist()
        assert grids == [sizes[place.tokens] for place in places]
        found += grids
    assert found == [sizes[4], sizes[6], sizes[6]]


@pytest.mark.parametrize("length", [24, 8])
def test_a_stream_of_texts_gives_the_same_blocks(length, tokenizer, folder):
    texts = [*TEXTS, *TEXTS[::-1], TEXTS[1], TEXTS[0]]
    blocks = load(texts, tokenizer, folder, kind="pretrain", seq_length=length)
    found = streamed(texts, tokenizer, folder, kind="pretrain", seq_length=length)
    assert len(found) == len(blocks)
    for mine, its in zip(found, (blocks[index] for index in range(len(blocks))), strict=True):
        assert mine.keys() == its.keys()
        assert torch.equal(mine["input_ids"], its["input_ids"])
        assert torch.equal(mine["labels"], its["labels"])
        if "images" in mine:
            assert placed(mine) == placed(its)
            theirs, ours = its["images"].tensors(), mine["images"].tensors()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_stream_of_texts_names_what_is_wrong(tokenizer, folder):
    with pytest.raises(
        McaError, match="train_file: an image has 6 tokens with its marks, more than seq_length 5"
    ):
        streamed(TEXTS, tokenizer, folder, kind="pretrain", seq_length=5)
    wrong = [TEXTS[1], {"text": "none", "images": ["small.png"]}]
    with pytest.raises(McaError, match=r"^train_file, row 1: 0 placeholders of images .* but 1 image;"):
        streamed(wrong, tokenizer, folder, kind="pretrain")
    (folder / "gone.png").write_bytes((folder / "wide.png").read_bytes())
    late = streamed(
        [TEXTS[1], {"text": "<image>", "images": ["gone.png"]}], tokenizer, folder, kind="pretrain"
    )
    (folder / "gone.png").unlink()
    with pytest.raises(McaError, match=r"^train_file, row 1: image .*gone.png is not there"):
        late[0]["images"].tensors()


def test_blocks_of_texts_name_what_is_wrong(tokenizer, folder):
    with pytest.raises(
        McaError, match="train_file: an image has 6 tokens with its marks, more than seq_length 5"
    ):
        load(TEXTS, tokenizer, folder, kind="pretrain", seq_length=5)
    wrong = [TEXTS[1], {"text": "none", "images": ["small.png"]}]
    with pytest.raises(McaError, match=r"^train_file, row 1: 0 placeholders of images .* but 1 image;"):
        load(wrong, tokenizer, folder, kind="pretrain")
    spelt = {"text": f"{MARKS[1]} <image>", "images": ["small.png"]}  # it would move every later image
    with pytest.raises(McaError, match=r"^train_file, row 1: .* 2 placeholders"):
        load([TEXTS[0], spelt], tokenizer, folder, kind="pretrain")


PAIRS = {
    "trl": lambda prompt: {
        "prompt": prompt,
        "chosen": [ANSWER],
        "rejected": [{"role": "assistant", "content": "blue it is"}],
    },
    "whole conversations": lambda prompt: {
        "chosen": [*prompt, ANSWER],
        "rejected": [*prompt, {"role": "assistant", "content": "blue it is"}],
    },
}


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("stream", [False, True])
def test_both_answers_of_a_pair_see_the_prompts_images(form, stream, tokenizer, folder):
    prompt = [{"role": "user", "content": [{"type": "image"}, text("what, beside "), {"type": "image"}]}]
    rows = [
        {**PAIRS[form](prompt), "images": ["small.png", "wide.png"]},
        {**PAIRS[form]([{"role": "user", "content": "nothing?"}]), "images": []},
    ]
    made = streamed if stream else load
    found = made(rows, tokenizer, folder, kind="dpo")
    alike = load([{"messages": [*prompt, ANSWER], "images": ["small.png", "wide.png"]}], tokenizer, folder)[0]
    for side in ("chosen", "rejected"):
        assert found[0][f"{side}_images"].places == alike["images"].places
        seen = found[0][f"{side}_images"].tensors()
        assert torch.equal(seen["pixel_values"], alike["images"].tensors()["pixel_values"])
        assert f"{side}_images" not in found[1]
    assert torch.equal(found[0]["chosen_input_ids"], alike["input_ids"])
    batch = StepCollator(collate=PadCollator(0), micro_batch_size=2, images=MediaJoiner(sections=True))
    (micro,) = batch([(found[0], True), (found[1], True)]).micro_batches
    assert micro.images["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6]] * 2
    rows = micro.feature_rows
    assert rows[rows >= 0].tolist() == [*range(20)]
    assert ((rows >= 0).sum(1)).tolist() == [10, 10, 0, 0]


def test_kto_measures_other_answers_on_the_same_images(tokenizer, folder):
    rows = [
        {
            "prompt": [{"role": "user", "content": "what?"}],
            "completion": [ANSWER],
            "images": ["wide.png"],
            "label": True,
        },
        {
            "prompt": [{"role": "user", "content": "and?"}],
            "completion": [ANSWER],
            "images": [],
            "label": False,
        },
    ]
    samples = load(rows, tokenizer, folder, kind="kto", arguments=ClassifyArguments)
    shape = [{"instruction": "and?", "output": "red", "label": False}]  # the label is none of its columns
    (shaped,) = load(shape, tokenizer, folder, kind="kto", arguments=ClassifyArguments)
    assert shaped["values"].tolist() == [0.0]
    both = KtoKlPairs(samples, 2, None)
    assert both[0]["other_images"].places == both[0]["images"].places
    assert "other_images" not in both[1]
    answer = [{"role": "assistant", "content": [{"type": "image"}]}]
    wrong = {"prompt": [{"role": "user", "content": "and?"}], "completion": answer, "images": ["small.png"]}
    samples = load(
        [rows[0], {**wrong, "label": True}], tokenizer, folder, kind="kto", arguments=ClassifyArguments
    )
    with pytest.raises(McaError, match="a completion has an image; put images in prompts only"):
        KtoKlPairs(samples, 2, None)[0]


CACHED = {
    "sft": [ROW, asked(text("none?")), {**ROW, "messages": [*ROW["messages"], *ROW["messages"]]}],
    "dpo": [
        PAIRS["trl"](ROW["messages"][:1]),
        PAIRS["trl"](asked(text("?"))["messages"][:1]),
    ],
    "pretrain": TEXTS,
}


@pytest.mark.parametrize("kind", CACHED)
def test_samples_with_images_are_cached(kind, tokenizer, folder, tmp_path, caplog):
    def flat(samples):
        return [
            {
                name: (x.places, x.tensors()) if name.endswith("images") else x
                for name, x in samples[index].items()
            }
            for index in range(len(samples))
        ]

    rows, cache = CACHED[kind], str(tmp_path / "tokens")
    expected = flat(load(rows, tokenizer, folder, kind=kind))
    assert any(name.endswith("images") for sample in expected for name in sample)
    for reported in (False, True):
        with caplog.at_level("INFO"):
            found = flat(load(rows, tokenizer, folder, kind=kind, tokenized_cache=cache))
        assert ("loaded tokenized samples" in caplog.text) == reported
        for mine, its in zip(found, expected, strict=True):
            assert mine.keys() == its.keys()
            for name, value in its.items():
                if name.endswith("images"):
                    assert mine[name][0] == value[0]
                    assert all(torch.equal(mine[name][1][each], value[1][each]) for each in value[1])
                else:
                    assert torch.equal(mine[name], value)


def test_a_processors_chat_template_serves_the_tokenizer(tmp_path):
    bare = image_tokenizer()
    template, bare.chat_template = bare.chat_template, None
    bare.save_pretrained(tmp_path)
    settings = SimpleNamespace(
        data=SimpleNamespace(tokenizer_name_or_path=None, model_name_or_path=str(tmp_path))
    )
    assert load_tokenizer(settings).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(settings).chat_template == template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(
        McaError, match=r"chat_template.json: 'chat_template' is 3; expected a template's text"
    ):
        load_tokenizer(settings)
    (tmp_path / "chat_template.json").write_text('{"chat_')
    with pytest.raises(McaError, match=r"chat_template.json"):
        load_tokenizer(settings)
