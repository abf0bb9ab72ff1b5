"""Rows whose images could be lost without a word: by their columns, their parts, their length, or the kind of run."""

import json
from types import SimpleNamespace

import datasets
import pytest
import torch
from drawn_images import MARKS, TEMPLATE, image_token
from image_samples import ANSWER, asked, load, placed, reader, streamed, text
from PIL import Image
from tokenizers_for_tests import byte_tokenizer

from mca_config.errors import McaError
from mca_train.config.arguments import PairArguments
from mca_train.data.encoding import check_messages
from mca_train.data.image_files import open_image
from mca_train.data.image_rows import ImageRows, without_decoding
from mca_train.data.placeholders import require_no_placeholders
from mca_train.data.row_paths import RowPaths
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_mixture, load_stream, load_tokenized

pytestmark = pytest.mark.usefixtures("own_cache")

IMAGE = {"type": "image", "path": "wide.png"}


def files_of(folder, *files):
    """A file of each list of rows."""
    paths = [folder / f"part-{number}.jsonl" for number in range(len(files))]
    for path, rows in zip(paths, files, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path) for path in paths]


def arguments(kind="sft", **others):
    return TASKS[kind].data_arguments(model_name_or_path="m", **others)


SECOND = {
    "a turn of the user has <image>": {
        "messages": [{"role": "user", "content": "<image>?"}, ANSWER],
        "pictures": ["small.png"],
    },
}


@pytest.mark.parametrize("reported", SECOND)
def test_the_second_of_two_files_is_refused_as_the_first(reported, tokenizer, folder):
    plain = {"messages": [{"role": "user", "content": "?"}, ANSWER]}
    files = files_of(folder, [plain], [SECOND[reported]])
    with pytest.raises(McaError, match=f"^train_file, row 1: {reported}"):
        load_tokenized(TASKS["sft"], files, tokenizer, arguments(), images=reader(tokenizer, folder))
    given = arguments(streaming=True)
    rows = load_stream(TASKS["sft"], files, tokenizer, given, seed=None, images=reader(tokenizer, folder))
    with pytest.raises(McaError, match=rf"^train_file, row 0 of \S+part-1.jsonl: {reported}"):
        list(rows)


def test_files_of_several_makers_have_their_images_in_columns_of_their_own(tokenizer, folder):
    turns = {"messages": [{"role": "user", "content": "<image>?"}, ANSWER]}
    rows = [{**turns, "image": "small.png"}, {**turns, "images": ["wide.png"]}]
    files = files_of(folder, rows[:1], rows[1:])
    made = load_tokenized(TASKS["sft"], files, tokenizer, arguments(), images=reader(tokenizer, folder))
    assert [placed(made[index])[0][1:] for index in range(2)] == [(2, 2), (2, 3)]
    kept = {**asked(text("?")), "image": "python:3.11", "picture": None}
    assert "images" not in load([kept], tokenizer, folder, images_column="picture")[0]
    both = {**asked({"type": "image"}, text("?")), "images": ["wide.png"], "image": "python:3.11"}
    assert placed(load([both], tokenizer, folder, images_column="images")[0])[0][1:] == (2, 3)


def test_images_are_those_of_the_columns_that_are_read(tokenizer, folder):
    turn = {"role": "user", "content": "<image>?"}
    row = {"messages": [turn, ANSWER], "prompt": [turn], "completion": [ANSWER], "images": ["wide.png"]}
    for named in ({}, {"completion_column": "completion"}):
        assert [place[1:] for place in placed(load([row], tokenizer, folder, **named)[0])] == [(2, 3)]
    with pytest.raises(McaError, match=r"^train_file: no column 'a', which completion_column names"):
        load([row], tokenizer, folder, completion_column="a")


def test_an_element_of_xml_is_text(tokenizer, folder):
    feed = {"messages": [{"role": "user", "content": "<image><url/></image>?"}, ANSWER]}
    spoken = {"messages": [{"role": "user", "content": "?"}, {**ANSWER, "content": "<image>"}]}
    made = load([feed, spoken], tokenizer, folder)
    assert not any("images" in made[index] for index in range(2))


def test_a_text_model_is_told_of_images_but_not_of_a_column_that_is_called_so(tokenizer, folder):
    rows = [{**asked(text("?")), "image": "python:3.11", "video": "a talk"}]
    assert len(load(rows, tokenizer, folder, vision=False)) == 1
    texts = [{"text": "words", "image": "python:3.11"}, {"text": "more", "image": None}]
    assert len(load(texts, tokenizer, folder, kind="pretrain", vision=False)) == 1


def test_placeholders_of_what_a_row_does_not_have_are_refused(tokenizer, folder):
    vision = {"image_token_index": 5, "video_token_id": 7}
    require_no_placeholders([1, 2], vision)
    require_no_placeholders([5, 7], None)
    require_no_placeholders([1, 5], vision, media={"image"})
    with pytest.raises(McaError, match=r"^row 3: the text contains the image placeholder \(token 5\), but"):
        require_no_placeholders([1, 5], vision, "row 3: ")
    with pytest.raises(McaError, match=r"the video placeholder \(token 7\), but the row has no video"):
        require_no_placeholders([5, 7], vision, media={"image"})
    pair = {"prompt": MARKS[1], "chosen": "a", "rejected": "b"}
    with pytest.raises(McaError, match=r"^train_file, row 0: the text contains the image placeholder"):
        load([pair], tokenizer, folder, kind="dpo")


@pytest.mark.parametrize("column", [{}, {"images": []}])
@pytest.mark.parametrize("made", [load, streamed])
def test_a_placeholder_in_plain_text_is_its_letters(made, column, tokenizer, folder, caplog):
    words = [f"see {MARKS[1]}http://x<|im_end|>", f"{MARKS[1]}{MARKS[1]}"]
    rows = [{"text": text, **column} for text in words]
    (block,) = (each := made(rows, tokenizer, folder, kind="pretrain"))
    assert len(each) == 1
    tokens = block["input_ids"].tolist()
    assert tokenizer.decode(tokens) == "".join(f"{text}<|eos|>" for text in words)
    assert image_token(tokenizer) not in tokens
    assert tokens.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert caplog.text.count("train_file, row 0: the text contains the tokenizer's placeholder") == 1
    assert caplog.text.count("placeholder of an image") == 1


@pytest.mark.parametrize("made", [load, streamed])
def test_a_place_in_a_row_without_images_is_text_and_told_once(made, tokenizer, folder, caplog):
    asks = [{"role": "user", "content": "docker run <image>?"}, {**ANSWER, "content": "run <image>"}]
    rows = [
        {**asked({"type": "image"}, text("?")), "image": "small.png"},
        {"messages": asks, "image": None},
        {"messages": asks, "image": ""},
    ]
    first, *others = (found := made(rows, tokenizer, folder))[0], found[1], found[2]
    assert "images" in first
    for sample in others:
        assert "images" not in sample
        assert "docker run <image>?" in tokenizer.decode(sample["input_ids"])
    assert (
        caplog.text.count("<image> in the text of a row without an image in images or image is trained") == 1
    )
    caplog.clear()
    (sample,) = (each := made([{"messages": asks}], tokenizer, folder, images_column="pictures"))
    assert len(each) == 1
    assert "images" not in sample
    assert "without an image in pictures is trained as text" in caplog.text
    caplog.clear()
    texts = [{"text": "see <image>", "images": ["small.png"]}, {"text": "run <image>", "images": []}]
    found = made(texts, tokenizer, folder, kind="pretrain")
    assert "run <image><|eos|>" in tokenizer.decode(found[0]["input_ids"])
    assert "without an image in images or image is trained as text" in caplog.text
    with pytest.raises(McaError, match=r"row 0: 2 placeholders of images .* but 1 image;"):
        made([{"messages": asks, "image": "small.png"}], tokenizer, folder)


@pytest.mark.parametrize("made", [load, streamed])
@pytest.mark.parametrize("others", [{}, {"videos": None}])
def test_a_place_in_plain_text_is_refused_where_no_column_has_images(made, others, tokenizer, folder, caplog):
    rows = [{"text": "see <image> url </image>", "pictures": ["small.png"], **others}]
    made(rows, tokenizer, folder, kind="pretrain")
    rows += [{**rows[0], "text": "see <image>"}] * 2
    with pytest.raises(
        McaError,
        match=r"^train_file, row 1: text has <image>, the placeholder of an image, but the rows have no",
    ):
        made(rows, tokenizer, folder, kind="pretrain")
    assert not caplog.text
    (block,) = (each := made(rows, tokenizer, folder, kind="pretrain", images_column="none"))
    assert len(each) == 1
    assert tokenizer.decode(block["input_ids"]).endswith("see <image><|eos|>")
    assert caplog.text.count("without an image in none is trained as text") == 1
    (block,) = load(rows[1:], tokenizer, folder, vision=False, kind="pretrain")
    assert "images" not in block


@pytest.mark.parametrize("kind", ["sft", "pretrain"])
@pytest.mark.parametrize(
    ("column", "entry", "named"),
    [
        ("pics", {}, "pics"),
        ("images", {}, "images"),
        ("pics", {"columns": {"images": "pics"}}, "images"),
    ],
)
def test_one_source_of_a_mixture_has_images_and_another_words_of_them(
    kind, column, entry, named, tokenizer, folder, caplog
):
    words = {"text": "<image>?", "messages": [{"role": "user", "content": "<image>?"}, ANSWER]}
    first, second = files_of(folder, [{**words, column: ["wide.png"]}], [words])

    def made(**names):
        entries = [{"path": first, **entry}, {"path": second}]
        given = arguments(kind, seq_length=64, datasets=entries, **names)
        return load_mixture(TASKS[kind], tokenizer, given, seed=0, images=reader(tokenizer, folder))

    with pytest.raises(McaError, match=r"has <image>, .* images_column .* to the image column of other rows"):
        made()
    mixture = made(images_column=named)
    seen, reported = (mixture[place] for place in range(2))
    assert [place[1:] for place in placed(seen)] == [(2, 3)] and "images" not in reported
    assert "<image>?" in tokenizer.decode(reported["input_ids"])
    assert caplog.text.count(f"without an image in {named} is trained as text") == 1


@pytest.mark.parametrize("size", ["min_pixels", "max_pixels", "resized_height", "resized_width"])
def test_sizes_of_single_images_are_refused(size, tokenizer, folder):
    reported = f"^train_file, row 0: an image has {size}, which the model's image processor does not support per image"
    in_column = {**asked({"type": "image"}, text("?")), "images": [{"path": "wide.png", size: 784}]}
    beside = {**asked({"type": "image", size: 784}, text("?")), "images": ["wide.png"]}
    for row in (asked({**IMAGE, size: 784}, text("?")), in_column, beside):
        with pytest.raises(McaError, match=reported):
            load([row], tokenizer, folder)
    assert "images" in load([asked({**IMAGE, size: None}, text("?"))], tokenizer, folder)[0]


@pytest.mark.parametrize("made", [load_tokenized, load_stream])
def test_files_may_differ_in_columns_of_images_that_nobody_reads(made, tokenizer, folder):
    rows = [{**asked(text("?")), "image": image, "audio": audio} for image, audio in (("x", 1), (["y"], "z"))]
    files = files_of(folder, rows[:1], rows[1:])
    beside = {} if made is load_tokenized else {"seed": None}
    given = arguments(streaming=bool(beside))
    blind = reader(tokenizer, folder, vision=False)
    assert len([*made(TASKS["sft"], files, tokenizer, given, images=blind, **beside)]) == 2
    with pytest.raises(McaError, match="cannot be combined"):
        made(TASKS["sft"], files, tokenizer, given, images=reader(tokenizer, folder), **beside)


def test_parts_of_text_say_so_to_the_template():
    parts = [{"text": "a"}, {"type": "input_text", "text": "b"}, text("c"), {"type": "thinking", "text": "d"}]
    (turn,) = check_messages([{"role": "user", "content": parts}])
    assert turn["content"] == [text("a"), text("b"), text("c"), parts[3]]
    (turn,) = check_messages([{"role": "user", "content": [{**text("a"), "image": "", "video": None}]}])
    assert turn["content"] == [text("a")]


@pytest.mark.parametrize("made", [load, streamed])
def test_pretrain_reads_one_image_of_a_column_and_refuses_what_it_cannot_read(made, tokenizer, folder):
    (block,) = (
        each := made([{"text": "see <image>", "image": "wide.png"}], tokenizer, folder, kind="pretrain")
    )
    assert len(each) == 1
    assert [place[1:] for place in placed(block)] == [(2, 3)]
    with pytest.raises(McaError, match=r"^train_file, row 0: has videos, which mca-train pretrain"):
        made([{"text": "see <video>", "videos": ["a.mp4"]}], tokenizer, folder, kind="pretrain")


@pytest.mark.parametrize("known", [True, False])
def test_pretrain_without_a_vision_model_refuses_images(known, tokenizer, folder):
    files = files_of(folder, [{"text": "none", "images": []}, {"text": "<image>", "images": ["wide.png"]}])
    images = reader(tokenizer, folder, vision=False) if known else None
    reported = "row 1.*: has images, which only mca-train pretrain with a vision-language model reads"
    with pytest.raises(McaError, match=reported):
        load_tokenized(TASKS["pretrain"], files, tokenizer, arguments("pretrain"), images=images)
    given = arguments("pretrain", streaming=True)
    with pytest.raises(McaError, match=reported):
        list(load_stream(TASKS["pretrain"], files, tokenizer, given, seed=None, images=images))


@pytest.mark.parametrize("kind", ["sft", "kto"])
def test_images_of_an_unknown_model_are_refused(kind, tokenizer, folder):
    row = {
        "messages": [{"role": "user", "content": "<image>?"}, ANSWER],
        "images": ["wide.png"],
        "label": True,
    }
    with pytest.raises(
        McaError, match=f"^train_file: mca-train {kind} does not support images, but the rows have"
    ):
        load_tokenized(TASKS[kind], files_of(folder, [row]), tokenizer, arguments(kind))


def test_a_template_without_images_is_told_of_long_rows_too(folder):
    blind = byte_tokenizer(TEMPLATE.replace("".join(MARKS), ""))
    blind.add_tokens(list(MARKS), special_tokens=True)
    row = {"messages": [*asked(text("none?"))["messages"], *asked(IMAGE, text("what?"))["messages"]]}
    for made in (load, streamed):
        with pytest.raises(McaError, match=r"row 0: the chat template makes 0 placeholders .* of 1 image;"):
            made([row], blind, folder, seq_length=40)


def test_a_stream_says_before_training_whether_it_has_images(tokenizer, folder):
    def has(kind, *rows):
        given = arguments(kind, streaming=True)
        files = files_of(folder, *([row] for row in rows))
        images = reader(tokenizer, folder)
        return load_stream(TASKS[kind], files, tokenizer, given, seed=None, images=images).has_images

    assert has("sft", asked(text("?")), asked(IMAGE))
    assert has("sft", {**asked(text("?")), "image": "wide.png"})
    assert has("pretrain", {"text": "<image>", "images": ["wide.png"]})
    assert not has("sft", asked(text("?")))
    assert not has("pretrain", {"text": "?", "images": []})


def test_media_of_rows_are_not_decoded_wherever_they_are():
    features = {
        "image": datasets.Image(),
        "sounds": datasets.List(datasets.Audio()),
        "turn": {"image": datasets.Image()},
    }
    rows = datasets.Dataset.from_dict({name: [None] for name in features}, datasets.Features(features))
    plain = without_decoding(rows).features
    assert not (plain["image"].decode or plain["sounds"].feature.decode or plain["turn"]["image"].decode)


def test_images_inside_messages_are_not_decoded_early(tokenizer, folder, tmp_path):
    Image.open(folder / "wide.png").convert("CMYK").save(tmp_path / "print.jpg")
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    turn = {"role": datasets.Value("string"), "content": datasets.List(part)}
    said = [{"type": "image", "text": None, "image": str(tmp_path / "print.jpg")}]
    said += [{"type": "text", "text": "what?", "image": None}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "red", "image": None}]}
    row = {"messages": [[{"role": "user", "content": said}, answer]]}
    features = datasets.Features({"messages": datasets.List(turn)})
    datasets.Dataset.from_dict(row, features).to_parquet(tmp_path / "rows.parquet")
    files, images = [str(tmp_path / "rows.parquet")], reader(tokenizer, folder)
    made = load_tokenized(TASKS["sft"], files, tokenizer, arguments(), images=images)
    given = arguments(streaming=True)
    (streams,) = load_stream(TASKS["sft"], files, tokenizer, given, seed=None, images=images)
    held_there = made.images.rows[0]["messages"][0]["content"][0]["image"]
    assert held_there.keys() == {"bytes", "path"}
    assert placed(made[0]) == placed(streams)
    pixels = made[0]["images"].tensors()["pixel_values"]
    assert torch.equal(pixels, streams["images"].tensors()["pixel_values"])
    held = open_image(Image.open(tmp_path / "print.jpg"), RowPaths())
    assert held.pixels().tobytes() == open_image(str(tmp_path / "print.jpg"), RowPaths()).pixels().tobytes()


def test_blocks_begin_an_image_with_its_mark_and_are_never_one_token(tokenizer, folder):
    names = ("small.png", "wide.png", "small.png")
    texts = [{"text": f"{'a' * number}<image>b", "images": [names[number % 3]]} for number in range(9)]
    begin, token, end = tokenizer.convert_tokens_to_ids(list(MARKS))
    for length in (8, 13, 25):  # at 8 a token stands alone between two images, at 25 at the end
        kept = load(texts, tokenizer, folder, kind="pretrain", seq_length=length)
        blocks = [kept[index]["input_ids"].tolist() for index in range(len(kept))]
        assert [
            each["input_ids"].tolist()
            for each in streamed(texts, tokenizer, folder, kind="pretrain", seq_length=length)
        ] == blocks
        assert min(map(len, blocks)) > 1
        for index, block in enumerate(blocks):
            if token in block:
                for place in kept[index]["images"].places:
                    assert block[place.start - 1] == begin, (length, index)
                    assert place.start > 0
                    assert block[place.start + place.tokens] == end
            else:
                assert "images" not in kept[index]


@pytest.mark.parametrize("made", [load, streamed])
@pytest.mark.parametrize("of_column", [False, True])
def test_a_prompt_that_both_conversations_repeat_has_its_images_once(made, of_column, tokenizer, folder):
    prompt = [{"role": "user", "content": [{"type": "image"} if of_column else IMAGE, text("what?")]}]
    other = {"role": "assistant", "content": "blue"}
    row = {"prompt": prompt, "chosen": [*prompt, ANSWER], "rejected": [*prompt, other]}
    alone = {"prompt": prompt, "chosen": [ANSWER], "rejected": [other]}
    beside = {"images": ["wide.png"]} if of_column else {}
    found, expected = (made([{**each, **beside}], tokenizer, folder, kind="dpo")[0] for each in (row, alone))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = (
            found[name].places == value.places if name.endswith("images") else torch.equal(found[name], value)
        )
        assert same, name


@pytest.mark.parametrize(
    ("chosen", "rejected", "count"),
    [("ab", "ab", 2), ("ab", "a", 0), ("a", "ab", 0), ("abc", "abd", 2), ("b", "", 0)],
)
def test_a_prompt_is_repeated_if_both_conversations_begin_with_it(chosen, rejected, count):
    def turns(text):
        return [{"role": "user", "content": letter, "weight": None} for letter in text]

    rows = SimpleNamespace(arguments=PairArguments(model_name_or_path="m"))
    row = {"prompt": turns("ab"), "chosen": turns(chosen), "rejected": turns(rejected)}
    assert ImageRows._num_repeated_turns(rows, row) == count
    assert ImageRows._num_repeated_turns(rows, {"prompt": "ab", "chosen": "a", "rejected": "b"}) == 0
    assert ImageRows._num_repeated_turns(SimpleNamespace(arguments=None), row) == 0
