"""Conversations with images have the tokens that transformers' processors make of them, for every family."""

from functools import lru_cache
from types import SimpleNamespace

import pytest
from drawn_images import draw
from processor_cases import CASES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from mca_config.errors import McaError
from mca_models.templates import FAMILIES
from mca_train.config.arguments import DataArguments
from mca_train.data.encoding import row_encoder
from mca_train.data.image_rows import ImageReader, ImageRows
from mca_train.data.row_paths import RowPaths

SIZES = {"small": (16, 16), "wide": (40, 16), "tall": (24, 50)}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<turn>", "<end>"]
CORPUS = [
    "user\nwhat\n\n is\n\n\nthis \n\n\n\n? see: a\n b\n\n c the\n\n\n\n\n two <turn>\n\nmodel\n red\n\n"
] * 8


_TURNS = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}@{% endfor %}{% endif %}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
_TEXT = "{% else %}{{ part['text'] }}{% endif %}"
_IF = "{% if part['type'] == 'image' %}"
STYLES = {
    "expression": _TURNS.replace("@", _IF + "{{ 'MARK' }}" + _TEXT),
    "expression that trims": _TURNS.replace("@", _IF + "  {{- 'MARK' -}}\n " + _TEXT),
    "raw": _TURNS.replace("@", _IF + "MARK" + _TEXT),
    "raw in lines": _TURNS.replace("@", _IF + "\nMARK\n" + _TEXT),
    "raw in spaces": _TURNS.replace("@", _IF + " MARK  " + _TEXT),
    "raw at line begins": _TURNS.replace("@", _IF + "\n\n  MARK\n  " + _TEXT),
    "raw and trimmed": _TURNS.replace(
        "@", "{%- if part['type'] == 'image' -%}\n MARK \n{%- else -%} {{ part['text'] }} {%- endif -%}"
    ),
    "raw and kept": _TURNS.replace(
        "@", "{%+ if part['type'] == 'image' +%}\nMARK\n  {%+ else %}" + _TEXT[10:]
    ),
    "behind a comment": _TURNS.replace("@", _IF + "{# an image #}MARK{# and on #}" + _TEXT),
    "images first": _TURNS.replace(
        "{% for part in m['content'] %}@",
        "{% for part in m['content'] if part['type'] == 'image' %}MARK{% endfor %}"
        "{% for part in m['content'] if part['type'] != 'image' %}{{ part['text'] }}",
    ),
    "a variable": "{% set mark = 'MARK' %}"
    + _TURNS.replace(
        "@", _IF + "{{ mark }}{% elif mark in part['text'] %}{{ raise_exception('a mark') }}" + _TEXT
    ),
    "a special token's name": _TURNS.replace("@", _IF + "NAMED" + _TEXT),
    "answers are marked": _TURNS.replace("@", _IF + "MARK" + _TEXT)
    .replace(
        "\n{% if m['content'] is string %}",
        "\n{% if m['role'] == 'assistant' %}{% generation %}{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for part in m['content'] %}" + _IF + "MARK" + _TEXT + "{% endfor %}{% endif %}<end>"
        "{% endgeneration %}{% elif m['content'] is string %}",
    )
    .replace(
        "{% endif %}<end>\n{% endfor %}",
        "{% endif %}{% if m['role'] != 'assistant' %}<end>{% endif %}\n{% endfor %}",
    ),
}


def image(name="small"):
    return {"type": "image", "path": f"{name}.png"}


def words(text):
    return {"type": "text", "text": text}


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)]


RED = [words("red")]
CHATS = {
    "image first": turns([image(), words("what?")], RED),
    "image last": turns([words("see:\n"), image("wide")], RED),
    "image in the middle": turns([words("a\n"), image("tall"), words("\n\n b")], RED),
    "two in a row": turns([image(), image("wide"), words(" the two")], RED),
    "two apart": turns([image(), words("\n"), image("tall")], RED),
    "several turns": turns(
        [image(), words("what?")], RED, [words("and ")], [words("a\n")], [words("this "), image("wide")], RED
    ),
    "system": [{"role": "system", "content": [words("see\n")]}, *turns([image("tall")], RED)],
    "texts as strings": turns("what?", "red\n", [image(), words("and this?")], "red"),
    "image in an answer": turns(
        [words("what?")], [image(), words("\nred")], [words("c")], [words("the "), image()]
    ),
    "none": turns([words("what\n\n?")], RED),
}


@lru_cache
def trained():
    """A byte-level BPE whose tokens join letters and line breaks; it begins texts with BOS."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return core.to_str()


@lru_cache
def made(family):
    """The tokenizer, the processor and the configuration of a family."""
    case = CASES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained()),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=dict(case.tokens),
    )

    class Processor(case.processor()):
        """One that takes no videos, whose processors need torchvision."""

        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    inner = {"image_processor": case.images(), "tokenizer": tokenizer}
    if "video_processor" in Processor.get_attributes():
        inner["video_processor"] = None
    if "feature_extractor" in Processor.get_attributes():
        inner["feature_extractor"] = WhisperFeatureExtractor(feature_size=8)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in case.tokens.items()}
    config = SimpleNamespace(
        model_type=family,
        vision_fields={"vision_config": {}, **case.vision(ids)},
        vision=SimpleNamespace(bidirectional_images=True),
        attention=SimpleNamespace(window_size=None),
    )
    return tokenizer, Processor(**inner, **case.options), config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for name, size in SIZES.items():
        draw(folder / f"{name}.png", *size)
    return folder


def encoded(family, chat, folder):
    """Return mca's encoding of a row."""
    return encoded_images(family, chat, folder)[0]


def encoded_images(family, chat, folder):
    """Return mca's encoding of a row, and the spans of its images with their marks."""
    tokenizer, _, config = made(family)
    place = folder / family
    if not place.exists():
        CASES[family].images().save_pretrained(place)
    reader = ImageReader(config=config, directories=(place,), paths=RowPaths(str(folder)))
    rows = ImageRows(["messages"], reader, DataArguments(model_name_or_path="m"), tokenizer, "train_file")
    (sequence,), (grids,) = rows.encode_row(
        {"messages": chat}, row_encoder(rows.names, rows.tokenizer, rows.arguments, "train_file"), "row 0"
    )
    return sequence, rows.tokens.spans(sequence[0], grids) if grids else []


def expected(family, chat, folder):
    """Return transformers' encoding, and the assistant's tokens by the template; None: the template marks none."""
    _, whole, _ = made(family)

    def absolute(content):
        if isinstance(content, str):
            return content
        return [{**part, "path": str(folder / part["path"])} if "path" in part else part for part in content]

    given = [{**turn, "content": absolute(turn["content"])} for turn in chat]
    marked = "{% generation %}" in whole.chat_template
    found = whole.apply_chat_template(
        given, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
    )
    (ids,) = found["input_ids"]
    return [int(token) for token in ids], found.get("assistant_masks", [None])[0]


def with_template(family, style):
    tokenizer, whole, _ = made(family)
    case = CASES[family]
    names = {token: name for name, token in case.tokens.items()}
    parts = case.mark.replace("><", ">\0<").split("\0")
    named = "".join(f"{{{{ {names[part]} }}}}" if part in names else part for part in parts)
    template = STYLES[style].replace("MARK", case.mark).replace("NAMED", named)
    tokenizer.chat_template = whole.chat_template = template


FEW = ("raw", "raw and trimmed", "images first", "answers are marked")


@pytest.mark.cases(
    0,
    always=[
        # processors of each kind write something else
        *(f"{family}-raw" for family in CASES),
        *(f"gemma3-{style}" for style in STYLES),
        *(f"{family}-{style}" for family in ("qwen2_5_vl", "internvl", "mistral3") for style in FEW),
    ],
)
@pytest.mark.parametrize(("family", "style"), [(family, style) for family in CASES for style in STYLES])
def test_chats_have_the_tokens_of_the_familys_processor(family, style, folder):
    with_template(family, style)
    tokenizer, whole, _ = made(family)
    written = {*whole.image_token_ids, *tokenizer.convert_tokens_to_ids([*CASES[family].written])}
    for name, chat in CHATS.items():
        ids, mask = expected(family, chat, folder)
        (tokens, targets), spans = encoded_images(family, chat, folder)
        assert tokenizer.decode(tokens) == tokenizer.decode(ids), name
        assert tokens == ids, name
        if name == "image in the middle" and style == "raw":
            require_kept(tokenizer, ids, spans)
        # numbers of Aya Vision's tiles are words, rows of Idefics end with a line, and MiniCPM's images have numbers,
        # on which mca does not train
        speaking = ("aya_vision", "idefics3", "smolvlm", "minicpmv4_6")
        said_more = family in speaking and name == "image in an answer"
        if mask is not None and not said_more:
            learnt = [bool(said) and token not in written for said, token in zip(mask, ids, strict=True)]
            assert targets == learnt, name


def require_kept(tokenizer, ids, spans):
    """Compare the span of "image in the middle" with all that the processor writes around the image."""
    ((start, stop),) = spans
    assert tokenizer.decode(ids[:start]).rstrip("\n").endswith("user\na")
    assert tokenizer.decode(ids[stop:]).lstrip("\n").startswith(" b<end>")
    assert "\n" not in tokenizer.decode([ids[start], ids[stop - 1]]), "the lines around it are text"


def test_no_family_with_images_is_left_out():
    seeing = {name for name, family in FAMILIES.items() if family.vision and family.vision.image_tokens}
    seeing = {name for name in seeing if not FAMILIES[name].built}
    assert seeing == CASES.keys()


def test_a_mark_in_the_words_of_a_row_is_no_image(folder):
    with_template("gemma3", "raw")
    with pytest.raises(McaError, match=r"contains the image placeholder .*, but the row has no image"):
        encoded("gemma3", turns("what is <start_of_image>?", "red"), folder)
    with pytest.raises(McaError, match=r"makes 2 placeholders .* of 1 image;"):
        encoded("gemma3", turns([image(), words("<start_of_image>?")], "red"), folder)
