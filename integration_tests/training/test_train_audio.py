"""Rows with audio through ``mca-train``: losses, and what is trained, are transformers' on every layout.

`--cases all` runs more kinds and layouts.
"""

import json
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from cases import Case, as_params, product
from harness import run_ranks
from media_runs import (
    LAYOUTS,
    LEARNED,
    RATE,
    STEPS,
    Row,
    adamw_losses,
    answer_log_prob,
    files_by_kind,
    load_model,
    require_judged_as_in_transformers,
    run_training,
)
from train_cases import history, make_trainer, quietly

pytest.importorskip("soundfile")
pytest.importorskip("soxr")
sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_vision

pytestmark = pytest.mark.ranks

CLIPS = {"low": (440, 0.3), "high": (1500, 1.1)}
"""Pitch and seconds."""
ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("<audio>what, after <audio>?", ("low", "high"), "red"),
    ("nothing to hear?", (), "no"),
    ("<audio>?", ("high",), "blue"),
    ("first <audio>then <audio>", ("high", "low"), "green it is"),
)
GOOD = (True, False, True, True)
WINDOWS = ("voxtral", "audioflamingo3", "glmasr")
"""Models that take a long clip as several windows; here of one second, or two where states are joined in fours."""


@cache
def folder_of(root: Path, model: str = "qwen2_audio") -> Path:
    """A checkpoint with tokenizer and feature extractor, clips, and the rows about them."""
    from drawn_audio import AUDIO_MARKS, audio_tokenizer, write

    root.mkdir(exist_ok=True)
    tokenizer = audio_tokenizer()
    config = tiny_vision.described(model, vocab_size=len(tokenizer), max_position_embeddings=512)
    token = "audio_token_index" if model == "qwen2_audio" else "audio_token_id"
    config[token] = tokenizer.convert_tokens_to_ids(AUDIO_MARKS[1])
    if model == "voxtral":
        config["audio_config"] |= {"intermediate_size": 32}
    if model != "glmasr":
        config["audio_config"] |= {"max_source_positions": 50 if model in WINDOWS else 100}
    torch.manual_seed(0)
    made = transformers.AutoModelForMultimodalLM.from_config(transformers.AutoConfig.for_model(**config))
    made.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    _extractor(root / "model").save_pretrained(root / "model")
    for name, (pitch, seconds) in CLIPS.items():
        write(root / f"{name}.wav", pitch, seconds * (2 if model == "glmasr" else 1))
    for kind, rows in _files().items():
        (root / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def _extractor(path: Path) -> Any:
    from drawn_audio import extractor

    model = json.loads((path / "config.json").read_text())["model_type"]
    return extractor(seconds=1 if model in WINDOWS and model != "glmasr" else 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("audio"))


def _files() -> dict[str, list[dict[str, Any]]]:
    """The rows of each kind of run."""
    rows = [(asked, said, {"audios": [f"{name}.wav" for name in clips]}) for asked, clips, said in ROWS]
    return files_by_kind(rows, GOOD)


def _inputs(folder: Path, asked: str, clips: tuple[str, ...], said: str) -> Row:
    """Return the inputs that transformers' own processor makes of a row."""
    import soundfile
    from drawn_audio import AUDIO_MARKS, RATE

    model = json.loads((folder / "model/config.json").read_text())["model_type"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    heard = [soundfile.read(folder / f"{name}.wav", dtype="float32")[0] for name in clips]
    mark = "".join(AUDIO_MARKS)
    if model in WINDOWS:
        processor = _Windows(model, _extractor(folder / "model"))
        for clip in heard:
            expanded = mark.replace(AUDIO_MARKS[1], AUDIO_MARKS[1] * processor.add(clip))
            asked = asked.replace("<audio>", expanded, 1)
    asked = asked.replace("<audio>", mark)
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    texts = (prompt, f"{prompt}{said}<|im_end|>\n")
    if model in WINDOWS:
        found, whole = (dict(tokenizer(text, return_tensors="pt")) | processor.inputs() for text in texts)
    else:
        own = transformers.Qwen2AudioProcessor(
            _extractor(folder / "model"), tokenizer, chat_template=tokenizer.chat_template
        )
        given: dict[str, Any] = {"audio": heard, "sampling_rate": RATE} if clips else {}
        found, whole = (dict(own(text=[text], **given, return_tensors="pt")) for text in texts)
    length, ids = found["input_ids"].shape[1], whole["input_ids"]
    return {**whole, "labels": ids.masked_fill(torch.arange(ids.shape[1]) < length, -100)}


class _Windows:
    """Inputs that the processors of `WINDOWS` make of clips, of which theirs take one for each text."""

    def __init__(self, model: str, extractor: Any) -> None:
        self._model, self._extractor = model, extractor
        self._found: list[dict[str, torch.Tensor]] = []

    def add(self, clip: Any) -> int:
        """Add a clip; return the number of its tokens."""
        from drawn_audio import RATE
        from transformers.models.audioflamingo3.processing_audioflamingo3 import AudioFlamingo3Processor
        from transformers.models.glmasr.processing_glmasr import GlmAsrProcessor
        from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

        if self._model == "voxtral":
            given = VoxtralProcessor.audio_kwargs | {"pad_to_multiple_of": RATE, "max_source_positions": 100}
            made = VoxtralProcessor._retrieve_input_features(
                SimpleNamespace(feature_extractor=self._extractor), [clip], **given
            )
            self._found.append({"input_features": made})
            return len(made) * 25
        kind = {"audioflamingo3": AudioFlamingo3Processor, "glmasr": GlmAsrProcessor}[self._model]
        processor = kind.__new__(kind)
        vars(processor).update(feature_extractor=self._extractor, max_audio_len=600, audio_token="")
        inputs, _ = processor._process_audio([clip], **kind.audio_kwargs)
        self._found.append({name: inputs[name] for name in ("input_features", "input_features_mask")})
        return int(inputs["num_audio_tokens"])

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the inputs of all clips together."""
        names = self._found[0] if self._found else {}
        return {name: torch.cat([each[name] for each in self._found]) for name in names}


def _load(path: Path) -> Any:
    """Return transformers' model; loading lets its table of positions train, which the class itself freezes."""
    model = load_model(path)
    if hasattr(model.model.audio_tower, "embed_positions"):
        model.model.audio_tower.embed_positions.requires_grad_(False)
    return model


@cache
def _expected(folder: Path) -> tuple[list[float], Any]:
    """The losses of fine-tuning, and the model after it."""
    model, rows = _load(folder / "model"), [_inputs(folder, *row) for row in ROWS]
    count = sum(int((row["labels"] != -100).sum()) for row in rows)
    return adamw_losses(model, lambda: -sum(answer_log_prob(model, row) for row in rows) / count), model


@pytest.mark.cases(0, always=["qwen2_audio-cp2packed"])
@pytest.mark.parametrize("case", as_params(product(("qwen2_audio",), tuple(LAYOUTS))))
def test_clips_train_as_in_transformers(case: Case, folder: Path) -> None:
    losses, model = _expected(folder)
    workers = ("--dataloader_num_workers", "1") if case.layout == "one" else ()
    logs = run_training(folder, case.layout, *LAYOUTS[case.layout], *workers)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > LEARNED
    theirs = dict(_load(folder / case.layout / "hf").named_parameters())
    # a twentieth of a step: where a gradient is next to nothing, Adam makes a step of its rounding errors
    worst = max(
        (float((theirs[name] - x).detach().abs().max()), name) for name, x in model.named_parameters()
    )
    assert worst[0] < 5e-5, worst


@pytest.mark.cases(0, always=["voxtral-tp2sp"])
@pytest.mark.parametrize("case", as_params(product(WINDOWS, tuple(LAYOUTS))))
def test_windows_of_clips_train_as_in_transformers(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = folder_of(tmp_path_factory.getbasetemp() / case.model, case.model)
    losses, model = _expected(folder)
    logs = run_training(folder, case.layout, *LAYOUTS[case.layout])
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    theirs = dict(_load(folder / case.layout / "hf").named_parameters())
    worst = max(
        (float((theirs[name] - x).detach().abs().max()), name) for name, x in model.named_parameters()
    )
    assert worst[0] < 5e-5, worst  # a twentieth of a step, as above


def _log_probs_and_stream(
    folder: Path, layout: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of training on log-probabilities of answers to clips, and a stream of the weights. Runs on every rank."""
    from mca_models import TokenValues
    from mca_models.templates import config_from_hf
    from mca_train import McaTrainer
    from mca_train.data.image_rows import ImageReader
    from mca_train.tasks import TASKS
    from mca_train.tasks.load import load_tokenized

    class OfLogProbs(McaTrainer):
        token_values = TokenValues()

        def compute_loss(self, output: Any, batch: Any, **_: object) -> tuple[Any, Any]:
            return -(output * batch.loss_mask).sum(), batch.loss_mask.sum().int()

    model = folder / "model"
    config = config_from_hf(json.loads((model / "config.json").read_text()))
    given = TASKS["sft"].data_arguments(model_name_or_path=str(model), seq_length=256)
    reader = ImageReader(config=config, directories=(model,))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = load_tokenized(TASKS["sft"], [str(folder / "sft.jsonl")], tokenizer, given, images=reader)
    trainer = make_trainer(
        model,
        folder / "log-probs",
        kind=OfLogProbs,
        train_dataset=rows,
        freeze=[],
        learning_rate=RATE,
        max_steps=STEPS,
        logging_steps=1,
        max_grad_norm=1.0,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **layout,
    )
    quietly(trainer.train)
    sent = {name: tensor.clone() for name, tensor in trainer.model.export_weights()}
    return history(trainer, "loss"), sent


@pytest.mark.cases(0, always=["tp2sp"])
@pytest.mark.parametrize("layout", ["tp2sp", "pp2"])
def test_log_probabilities_of_answers_to_clips_and_the_stream_of_weights(layout: str, folder: Path) -> None:
    losses, model = _expected(folder)
    sizes = {
        "tp2sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "pp2": {"pipeline_model_parallel_size": 2},
    }
    theirs = dict(model.named_parameters())
    for found, sent in run_ranks(2, _log_probs_and_stream, folder, sizes[layout]):
        assert found == pytest.approx(losses, rel=1e-5)
        named = {name: sent[_file_name(name)] for name in theirs}
        assert len(named) == len(sent)
        # a twentieth of a step: where a gradient is next to nothing, Adam makes a step of its rounding errors
        worst = max((float((named[name] - x).detach().abs().max()), name) for name, x in theirs.items())
        assert worst[0] < 5e-5, worst


def _file_name(name: str) -> str:
    """Return the name in files of a parameter of transformers' module."""
    for before, after in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ):
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name.removeprefix("model.")


@pytest.mark.qualify
def test_an_adapter_and_frozen_parts_hear_clips(folder: Path) -> None:
    """The first loss is that of the model, and the tower stays as it was."""
    losses, _ = _expected(folder)
    words = ("--freeze", "[audio, projector]", *LAYOUTS["tp2sp"])
    for name, more in (("lora", ("--lora_rank", "4")), ("frozen", ())):
        logs = run_training(folder, name, *words, *more)
        assert logs[0]["loss"] == pytest.approx(losses[0], rel=1e-5)
        assert logs[-1]["loss"] < losses[0] - 1e-4
    before, after = (dict(_load(folder / each).named_parameters()) for each in ("model", "frozen/hf"))
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert changed and not any("audio_tower" in name or "projector" in name for name in changed)


@pytest.mark.qualify
@pytest.mark.parametrize("layout", ["one", "tp2sp", "pp2"])
def test_judged_answers_to_clips_train_as_in_transformers(layout: str, folder: Path) -> None:
    require_judged_as_in_transformers(
        folder, layout, partial(_load, folder / "model"), partial(_inputs, folder), ROWS, GOOD
    )
