"""Every command and every snippet that the documents show is run, in order, page by page, on tiny models and data.

``Qwen3-8B`` is a random model of four layers and ``data/`` has a few rows. Only sizes are changed (`_SMALL`).
What a page shows as printed (its blocks of ``text``) must be printed, but for the numbers.
By default README.md is run; `--cases all` runs all pages.
"""

import json
import os
import re
import resource
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked_cli
from harness import run_ranks
from pages import BLOCK, ON_TWO_RANKS, not_printed, printed_in, split_at
from train_cases import tiny_checkpoint

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "examples/*/README.md")
    for path in sorted(ROOT.glob(pattern))
]
ELSEWHERE = {
    "docs/contribute.md": "its commands are tests, which run anyway, and test_add_a_layer.py runs its example",
}
PARTS_ELSEWHERE = {"docs/vision.md": ("\n## Videos\n", ""), "docs/python.md": ON_TWO_RANKS}
"""Headings between which a page is not run here: test_quick_starts.py plans those of vision.md."""
EXAMPLE_SECONDS = 120
"""Of a processor, for all commands of an example: each job is promised to take a minute on two of them.

Seconds of processors and not of a clock, so that other work on the machine does not count. `_run` forks ``mca-train``
and scripts from this process, so what they import (some ten seconds each time) does not count either.
"""
PUBLISHED = {"Qwen/Qwen3-8B": "tools/recipes/qwen3-8b.json"}
"""Models with their published ``config.json`` alone. Sizes in their files are not changed: they are only planned."""
NOT_RUN = (
    "pip ",
    "uv ",
    "source ",
    "pytest",
    "python examples/quickstart",
    "sbatch ",
    "python tools/",
    "PYTHONPATH=",
    "git ",
    "#",
    "eval ",
    "mkdocs ",
)
"""Beginnings of commands that install, lock, or need another machine."""
_SMALL = {
    "max_steps": 4,
    "seq_length": 128,
    "save_steps": 2,
    "eval_steps": 2,
    "logging_steps": 1,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 1,
}
_SMALL_FLAGS = _SMALL | {"max_steps": 6, "nproc-per-node": 4}  # over those of the file: a run that goes on


def _blocks(page: Path) -> Iterator[tuple[str, str]]:
    text = page.read_text()
    if headings := PARTS_ELSEWHERE.get(str(page.relative_to(ROOT))):
        _, text = split_at(text, *headings)
    yield from BLOCK.findall(text)


def _commands(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield line.removeprefix("$ ").strip()


def _is_run(command: str) -> bool:
    return not command.startswith(NOT_RUN)


def _small(text: str) -> str:
    if any(f"model_name_or_path: {model}\n" in text for model in PUBLISHED):
        return text
    for key, value in _SMALL.items():
        text = re.sub(rf"^{key}: \S+", f"{key}: {value}", text, flags=re.MULTILINE)
    return text


def _small_words(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    for place, word in enumerate(words[:-1]):
        if word.startswith("--") and word[2:] in _SMALL_FLAGS:
            words[place + 1] = str(_SMALL_FLAGS[word[2:]])
    if words[:2] == ["mca-train", "sft"] and words[2].startswith("--") and "--max_steps" not in words:
        words += ["--max_steps", str(_SMALL_FLAGS["max_steps"])]  # in place of 3 epochs
    return words


def _rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Set up a reader's files before the first command: a model and data of each kind."""
    from tokenizers_for_tests import byte_tokenizer

    folder = tmp_path_factory.mktemp("documents")
    tiny_checkpoint(folder / "Qwen3-8B", vocab_size=264)
    byte_tokenizer().save_pretrained(folder / "Qwen3-8B")
    texts = [f"row {number} of some text that is long enough to be trained on" for number in range(24)]
    turns = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": text[:9]}] for text in texts
    ]
    for model, config in PUBLISHED.items():
        (folder / model).mkdir(parents=True)
        shutil.copy(ROOT / config, folder / model / "config.json")
    _rows(folder / "data" / "text.jsonl", [{"text": text} for text in texts])
    _rows(folder / "data" / "eval.jsonl", [{"text": text} for text in texts[:4]])
    _rows(folder / "data" / "chat.jsonl", [{"messages": some} for some in turns])
    _rows(folder / "data" / "alpaca.jsonl", [{"instruction": "say", "input": "", "output": t} for t in texts])
    pairs = [{"prompt": text, "chosen": text[:9], "rejected": text[9:20]} for text in texts]
    _rows(folder / "data" / "pairs.jsonl", pairs)
    liked = [{"prompt": t, "completion": t[:9], "label": len(t) % 2 == 0} for t in texts]
    _rows(folder / "data" / "liked.jsonl", liked)
    names = ("negative", "positive")
    _rows(folder / "data" / "classes.jsonl", [{"text": t, "label": names[len(t) % 2]} for t in texts])
    run = {
        "model_name_or_path": "Qwen3-8B",
        "train_file": "data/text.jsonl",
        "output_dir": "runs/run",
        "seq_length": 128,
        "save_strategy": "'no'",
    }
    (folder / "run.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in (run | {"max_steps": 2}).items())
    )
    return folder


def _adapter(folder: Path) -> None:
    """``lora-mca``, a trained adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "Qwen3-8B")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "peft")
    paths = ["--adapter_path", "peft", "--checkpoint_path", "Qwen3-8B", "--output_path", "lora-mca"]
    assert _program(["mca-convert", *paths], folder).returncode == 0


def _seeing(folder: Path) -> None:
    """``Qwen/Qwen2.5-VL-7B-Instruct``, a random model that sees, and ``pictures/train.jsonl``."""
    import tiny_vision
    import transformers
    from drawn_images import draw, image_tokenizer, processor

    marks = {"vision_start_token_id": 260, "image_token_id": 261, "vision_end_token_id": 262}
    config = tiny_vision.described("qwen2_5_vl", vocab_size=264) | marks | {"video_token_id": 263}
    settings = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForMultimodalLM.from_config(settings)
    for part in (model, image_tokenizer(), processor()):
        part.save_pretrained(folder / "Qwen" / "Qwen2.5-VL-7B-Instruct")
    turns = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a cat"}]
    _rows(folder / "pictures" / "train.jsonl", [{"messages": turns, "images": ["cat.png"]}] * 8)
    draw(folder / "pictures" / "cat.png", 24, 16)


def _program(words: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--master-port", "29777", *words[1:]]
    else:
        words = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)


def _run(command: str, folder: Path) -> str:
    """Return the output of a command; a script prints where this process does."""
    words = _small_words(command)
    if words[0] == "python":
        run_ranks(1, _script, words[1:], process_group=False, timeout=240)
        return ""
    if words[0] == "mca-train":
        done = forked_cli.launched([sys.executable, "-m", "mca_train", *words[1:]])
    else:
        done = _program(words, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return f"{done.stdout}\n{done.stderr}\n"


def _workplace(page: Path, place: Path, folder: Path) -> Path:
    """The directory in which a page's commands run: an example's own, or one with a model and data."""
    if page.parent.parent.name == "examples":
        shutil.copytree(ROOT / "examples", folder / "examples")
        return folder / "examples" / page.parent.name
    shutil.copytree(place, folder, dirs_exist_ok=True)
    return folder


def _made_before(folder: Path, commands: str, snippets: str) -> None:
    """Return the files that a page takes from another job."""
    if "lora-mca" in commands:
        _adapter(folder)
    if "images.yaml" in commands:
        _seeing(folder)
    if '"qwen3-mca")  # a directory' in snippets:
        _run("mca-convert --checkpoint_path Qwen3-8B --output_path qwen3-mca", folder)


def _processor_seconds() -> float:
    """Return the CPU seconds of all ended child processes and their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _alone() -> None:
    """Return the environment of a process that no launcher has started."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    os.environ["HF_HUB_OFFLINE"] = "1"


def _execute(text: str, page: str) -> None:
    _alone()
    exec(compile(text, page, "exec"), {"__name__": "__main__"})


def _script(words: list[str]) -> None:
    """``python WORDS`` in a fork of this process, which has imported most of what a script needs."""
    _alone()
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _not_run_here(name: str, shown: list[str]) -> str:
    """Return the reason why a page is not run; empty if it is."""
    if not shown:
        return "shows nothing that is run"
    return ELSEWHERE.get(name, "")


@pytest.mark.cases(0, always=["README.md"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_runs(page, place, tmp_path, monkeypatch, capfd):
    name = str(page.relative_to(ROOT))
    blocks = list(_blocks(page))
    snippets = [text for language, text in blocks if language == "python"]
    commands = [
        c for language, text in blocks if language == "console" for c in _commands(text) if _is_run(c)
    ]
    if why := _not_run_here(name, commands + snippets):
        pytest.skip(why)
    folder = _workplace(page, place, tmp_path)
    monkeypatch.chdir(folder)
    _made_before(folder, " ".join(commands), " ".join(snippets))
    printed, before = "", _processor_seconds()
    for language, text in blocks:
        if language == "yaml" and (named := re.match(r"# (\S+\.yaml)\n", text)):
            (folder / named[1]).write_text(_small(text))
        for command in _commands(text) if language == "console" else ():
            if _is_run(command):
                printed += _run(command, folder)
    if snippets:
        run_ranks(1, _execute, "\n".join(snippets), name, process_group=False, timeout=240)
    printed += "\n".join(capfd.readouterr())
    shown = "".join(text for language, text in blocks if language == "text")
    assert not not_printed(shown, printed), printed
    if page.parent.parent.name == "examples":
        assert _processor_seconds() - before < EXAMPLE_SECONDS


@pytest.mark.qualify
@pytest.mark.parametrize(("name", "heading"), [("vision", ""), ("video", "Videos"), ("audio", "Audio")])
def test_a_model_learns_to_see_and_hear(name, heading, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--output_dir", str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "[ok]" in done.stdout
    if heading:
        shown = printed_in("vision.md", heading)
        assert "[ok]" in shown
        assert not not_printed(shown, done.stdout + done.stderr)


def test_a_command_that_fails_and_a_snippet_that_does_not_run_are_caught(place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(AssertionError, match="no-such-directory"):
        _run("mca-convert inspect no-such-directory", place)
    with pytest.raises(Exception, match="dataset"):
        run_ranks(1, _execute, "print(dataset)", "page", process_group=False, timeout=60)


def test_what_is_shown_but_not_printed_is_caught():
    printed = "step  1/4  loss 5.86  1 min 02 s left\nsaved runs/first\n  78 - 82  ###  1\n"
    assert not not_printed("step 10/500  loss 2.31  3 s left\n  10 - 20  #  7\n...\nsaved ...\n", printed)
    assert not_printed("step 1/4  norm 5.86\n", printed) == ["step 1/4  norm 5.86"]
    assert not_printed("saved runs/first\nsaved runs/second\n", printed) == ["saved runs/second"]


def test_sizes_alone_are_changed():
    assert (
        _small("# a.yaml\nmax_steps: 500  # x\noutput_dir: o\n")
        == "# a.yaml\nmax_steps: 4  # x\noutput_dir: o\n"
    )
    assert _small_words("mca-train sft a.yaml --max_steps 220 --lora_rank 16 # x")[3:] == [
        "--max_steps",
        "6",
        "--lora_rank",
        "16",
    ]
