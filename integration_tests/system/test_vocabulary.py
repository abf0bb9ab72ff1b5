"""Vocabulary of sources and documents: rates of dialect words, docstring openings and names, with limits.

The lists are samples of words that Megatron and Hugging Face do not use, or use for something else. Rewrite the
sentence instead of replacing the word. Each measure is shown to find a planted sentence, docstring or name.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from source_tree import FILES, ROOT

# Limits of the rates: those that other libraries of this field keep.
MAX_SOURCE_WORDS_PER_1000 = 0.2
MAX_DOCUMENT_WORDS_PER_1000 = 0.2
MAX_BAD_OPENINGS_PERCENT = 1.0
MAX_DIALECT_NAMES_PERCENT = 0.5

WORDS = re.compile(
    r"\b(beside|besides|anew|told|stands|stood|lies|lain|mended|mend|nobody|whatever|of its own|of their own|"
    r"what becomes of|without a word|as many as|its own way|by name alone|is refused by name|nowhere|"
    r"takes for|what stands|goes without|in its stead)\b",
    re.IGNORECASE,
)
OPENING = re.compile(r"(What|Whether|Those|Of|See|Where|How|Which|That|As|Who|Whose|Why|When)\b")
NAMES = re.compile(
    r"(^|_)(of|beside|told|tell|tells|anew|stands|held|carried|taken|takes|turned|own|heated|leaning|arrivals|wanted|"
    r"place|places|facts|pulse|sign|usual|subject|nesting|both_ways|chosen_keys|late|asked|settle|said|speak|mended|"
    r"valued|mismatched|compared|masters|lineage|survey|found|others|kin|given|unread|unmatched|begun)($|_)"
)
STRING = r""""{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*\'"""
STRINGS_OR_COMMENT = re.compile(rf"(#[^\n]*)|(?:{STRING})(?:\s+[frFR]?(?:{STRING}))*", re.DOTALL)
"""Adjacent strings, or a comment as the first group: a tenth of the time of `ast` or `tokenize`."""
DOCSTRING = re.compile(r'(?:\A(?:#.*\n|\s)*|:(?:[ \t]*#.*)?\n\s*)[rR]?"{3}(.*)')
DEFINITION = re.compile(r"^[ \t]*(?:async )?(?:def|class) (\w+)", re.MULTILINE)
ALLOWED_NAMES = {
    "in_place": "PyTorch's term for an operation that overwrites its input",
    "found_inf": "PyTorch's name of the overflow flag of a gradient scaler",
    "out_of_memory": "the name of the CUDA error",
    "end_of_sequence": "the tokenizer's term",
}
"""Parts of names that contain a listed word but are terms of the field, each with the reason."""
ALLOWED_PHRASES = {
    "as many as": ("as many as possible", "ordinary English for a maximum"),
}
"""Longer phrases that contain a listed one but are plain, each with the reason."""


@dataclass
class Rates:
    """Counts of one kind of text, and where the hits are."""

    total: int = 0
    hits: list[str] = field(default_factory=list)

    def per(self, unit: int) -> float:
        return unit * len(self.hits) / max(1, self.total)

    def problem(self, what: str, unit: int, limit: float) -> str:
        """A line for a failed test: the rate, the limit and the first hits."""
        return f"{self.per(unit):.2f} {what}, allowed {limit}: {', '.join(self.hits[:20])}"


def count_words(text: str) -> int:
    return len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))


def dialect_words(text: str) -> list[tuple[int, str]]:
    """Return the number of lines before each listed word, and the word."""
    for phrase, _ in ALLOWED_PHRASES.values():
        text = re.sub(re.escape(phrase), " ", text, flags=re.IGNORECASE)
    return [(text.count("\n", 0, match.start()), match.group().lower()) for match in WORDS.finditer(text)]


def is_bad_opening(docstring: str) -> bool:
    return OPENING.match(docstring) is not None


def is_dialect_name(name: str) -> bool:
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower().replace("__", "_")
    for part in ALLOWED_NAMES:
        snake = re.sub(rf"(^|_){part}(?=$|_)", "_", snake)
    return NAMES.search(snake) is not None


def line_of(source: str, position: int) -> int:
    return source.count("\n", 0, position) + 1


def texts(source: str) -> Iterator[tuple[int, int, str]]:
    """Docstrings, comments and strings with a space (messages, help), with their first and last lines."""
    for match in STRINGS_OR_COMMENT.finditer(source):
        if match[1]:
            text = match[1]
        else:
            text = "".join(string[0].strip("\"'") for string in re.finditer(STRING, match[0], re.DOTALL))
        if match[1] or " " in text:
            yield line_of(source, match.start()), line_of(source, match.end()), text.replace("\\n", "\n")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first line of text of each docstring."""
    for match in DOCSTRING.finditer(source):
        yield line_of(source, match.start(1)), match[1]


def definitions(source: str) -> Iterator[tuple[int, str]]:
    for match in DEFINITION.finditer(source):
        yield line_of(source, match.start(1)), match[1]


def prose(markdown: str) -> str:
    """Markdown without code blocks and code spans, with the same lines."""
    for code in (r"(?s)```.*?```", r"`[^`]*`"):
        markdown = re.sub(code, lambda match: " " + "\n" * match[0].count("\n"), markdown)
    return markdown


def word_rates(found: Iterator[tuple[int, int, str]], where: str, rates: Rates) -> None:
    for first, last, text in found:
        rates.total += count_words(text)
        rates.hits += [f"{where}:{min(first + below, last)} {word}" for below, word in dialect_words(text)]


def documents() -> list[Path]:
    """All documents but changelogs, which are checked when a release is made."""
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md")]
    return sorted(path for path in pages if path.name != "CHANGELOG.md")


def test_sources_use_few_dialect_words():
    rates = Rates()
    for path, source in FILES:
        word_rates(texts(source.text), str(path.relative_to(ROOT)), rates)
    limit = MAX_SOURCE_WORDS_PER_1000
    assert rates.per(1000) <= limit, rates.problem("dialect words per 1,000 in sources", 1000, limit)


def test_documents_use_few_dialect_words():
    rates = Rates()
    for path in documents():
        page = path.read_text()
        word_rates(iter([(1, page.count("\n") + 1, prose(page))]), str(path.relative_to(ROOT)), rates)
    limit = MAX_DOCUMENT_WORDS_PER_1000
    assert rates.per(1000) <= limit, rates.problem("dialect words per 1,000 in documents", 1000, limit)


def _other_files() -> list[tuple[Path, str]]:
    """Return the tests, tools, benchmarks and examples with their text."""
    folders = [ROOT / name for name in ("integration_tests", "benchmarks", "tools", "examples")]
    folders += (ROOT / "packages").glob("*/tests")
    return [(path, path.read_text()) for folder in folders for path in sorted(folder.rglob("*.py"))]


@pytest.mark.parametrize("kind", ["sources", "others"])
def test_docstrings_open_with_a_verb_or_a_noun(kind):
    rates = Rates()
    files = _other_files() if kind == "others" else [(path, source.text) for path, source in FILES]
    for path, source in files:
        for line, text in docstrings(source):
            rates.total += 1
            if is_bad_opening(text):
                rates.hits.append(f"{path.relative_to(ROOT)}:{line} {text.split()[0]}")
    limit = MAX_BAD_OPENINGS_PERCENT
    assert rates.per(100) <= limit, rates.problem("% of docstrings open badly", 100, limit)


def test_names_are_words_of_the_field():
    rates = Rates()
    for path, source in FILES:
        for line, name in definitions(source.text):
            rates.total += 1
            if is_dialect_name(name):
                rates.hits.append(f"{path.relative_to(ROOT)}:{line} {name}")
    limit = MAX_DIALECT_NAMES_PERCENT
    assert rates.per(100) <= limit, rates.problem("% of names are dialect", 100, limit)


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ('"""Return the weights that lie beside the model."""', ["beside"]),
        ("# the rank is told anew", ["told", "anew"]),
        ('raise ValueError("it stands as many as five times")', ["stands", "as many as"]),
        ('"""Use as many as possible."""', []),
        ('NAME = "beside"', []),  # a key, not a sentence
    ],
)
def test_a_planted_sentence_is_found(planted, words):
    rates = Rates()
    word_rates(texts(planted), "planted", rates)
    assert [hit.split(maxsplit=1)[1] for hit in rates.hits] == words


def test_a_planted_sentence_of_a_document_is_found_outside_code():
    page = "Nobody reads `beside`.\n```\nwhatever\n```\nit `a\nb` stands\n"
    assert dialect_words(prose(page)) == [(0, "nobody"), (5, "stands")]


def test_a_planted_word_is_found_on_its_line():
    source = '"""One.\n\nIt lies there,\nanew."""\nx = (\n    "a\\n b\\n c"\n    " told"\n)\n# it stands'
    rates = Rates()
    word_rates(texts(source), "a.py", rates)
    assert rates.hits == ["a.py:3 lies", "a.py:4 anew", "a.py:7 told", "a.py:9 stands"]


@pytest.mark.parametrize(
    ("planted", "is_bad"),
    [
        ('"""What a rank holds."""', True),
        ('def f():\n    """Whether it fits."""', True),
        ('class A:\n    """Of a model the layers."""', True),
        ('def f():\n    """Return whether it fits."""', False),
        ('class A:\n    """Whatsoever."""', False),
    ],
)
def test_a_planted_docstring_is_found(planted, is_bad):
    ((_, text),) = docstrings(planted)
    assert is_bad_opening(text) == is_bad


@pytest.mark.parametrize(
    ("planted", "is_dialect"),
    [
        ("def size_of(): ...", True),
        ("class ValuesHeld: ...", True),
        ("async def tell(): ...", True),
        ("def add_in_place(): ...", False),
        ("def profile(): ...", False),
        ("class Placement: ...", False),
    ],
)
def test_a_planted_name_is_found(planted, is_dialect):
    ((_, name),) = definitions(planted)
    assert is_dialect_name(name) == is_dialect


def test_every_exception_is_needed():
    """An exception without a listed word in it, or without a reason, would hide nothing or too much."""
    for part, reason in ALLOWED_NAMES.items():
        assert reason and NAMES.search(part), part
    for word, (phrase, reason) in ALLOWED_PHRASES.items():
        assert reason and word in phrase and WORDS.search(word), phrase
