"""Rules of a run that need no torch: about its keys, and about files, the tokenizer, directories and packages.

Each rule yields messages. No machine could follow what `KEY_RULES` report, `FILE_RULES` are about this machine; columns
are read without the libraries that load rows, which take seconds to import. `mca_train.run.rules` has the rules that
need transformers, a device or the model.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TextIO

from mca_config.errors import McaError, list_problems, raise_problems, raised_problems
from mca_config.files import has_entry, read_json
from mca_config.types import Values
from mca_models.checkpoint.hf_directory import INDEX, SINGLE, indexed_files
from mca_models.checkpoint.side_files import side_files
from mca_models.checkpoint_kinds import CheckpointKind, checkpoint_kind
from mca_models.hub import is_hub_id
from mca_models.storage.safetensors import read_header
from mca_train.checkpoint.output_files import require_free, require_usable, resolve
from mca_train.config.arguments import DataArguments, LoraArguments, PairArguments
from mca_train.config.early_arguments import optimizer_problems
from mca_train.config.run_config import Settings
from mca_train.data.files import COMPRESSED, check_file, reader_name, require_column
from mca_train.data.formats import FORMAT_COLUMNS, NO_TEMPLATE, ONE_ANSWER
from mca_train.data.sources import evaluation_arguments, parse_sources, source_arguments
from mca_train.data.urls import is_url, require_client
from mca_train.tasks.task import Task

TIMES = ("runtime", "samples_per_second", "steps_per_second")
"""Metrics of every evaluation in addition to the loss."""


def sources(task: Task, settings: Settings) -> Iterator[str]:
    """Yield contradictions among the keys of training files."""
    data = settings.data
    if data.datasets and data.train_file:
        yield "train_file and datasets are both set; name the file as an entry of datasets, or remove one"
    if data.datasets and data.streaming:
        yield "streaming reads train_file, not datasets; remove one of the two"
    if data.datasets and data.max_train_samples is not None:
        yield "max_train_samples is for train_file; set max_samples in the entries of datasets"


def streaming(task: Task, settings: Settings) -> Iterator[str]:
    """Yield problems of streaming: no max_steps, and keys that need or exclude it."""
    training, data = settings.training, settings.data
    if data.streaming and training.max_steps <= 0:
        yield "streaming needs max_steps: a stream has no length"
    if data.streaming and data.tokenized_cache is not None and not data.eval_file:
        yield "tokenized_cache keeps no samples of a stream; remove it or set streaming to false"
    if "shuffle_buffer_size" not in settings.values:
        return
    if not data.streaming:
        yield "shuffle_buffer_size is for streaming: rows in memory are all shuffled; remove it or set streaming"
    elif data.shuffle_buffer_size > 1 and str(training.train_sampling_strategy) == "sequential":
        yield "shuffle_buffer_size shuffles, but train_sampling_strategy is sequential; remove one of the two"


def evaluation(task: Task, settings: Settings) -> Iterator[str]:
    """Yield keys of training and evaluation that contradict one another, or need an eval_file."""
    values, training, data = settings.values, settings.training, settings.data
    if values.get("do_train", True) is not True and not training.do_train:
        yield "do_train is false, but mca-train trains; remove it"
    if values.get("do_eval", True) is not True and not training.do_eval and data.eval_file:
        yield "do_eval is false, but eval_file is set, which is evaluated at the end; remove one of the two"
    if not data.eval_file:
        needs = {
            f"eval_strategy is {training.eval_strategy.value}": training.eval_strategy != "no",
            "eval_on_start is true": training.eval_on_start,
            "do_eval is true": "do_eval" in values and training.do_eval and training.eval_strategy == "no",
        }
        for setting in (setting for setting, is_on in needs.items() if is_on):
            yield f"{setting}, but eval_file is not set; set it or remove {setting.split()[0]}"
        if data.max_eval_samples is not None:
            yield "max_eval_samples is set, but eval_file is not; set it or remove max_eval_samples"
    if training.save_strategy == "best" and training.eval_strategy == "no":
        yield "save_strategy is best, but eval_strategy is no, so no checkpoint is the best; set eval_strategy"
    elif training.load_best_model_at_end and training.eval_strategy == "no":
        yield (
            "load_best_model_at_end is true, but eval_strategy is no, so there is no best model; set it "
            "or remove the key"
        )


def adapter_keys(task: Task, settings: Settings) -> Iterator[str]:
    """Yield LoRA keys without effect, because no new adapter is created, and an unsupported checkpoint format."""
    lora = settings.lora
    keys = [key for key in settings.values if key in LoraArguments.__dataclass_fields__]
    unused = [key for key in keys if key not in ("lora_rank", "adapter_name_or_path")]
    if unused and lora.lora_rank is None:
        why = "adapter_name_or_path has its own" if lora.adapter_name_or_path else "lora_rank is not set"
        yield f"{', '.join(unused)}: {why}; remove the key or set lora_rank"
    if lora.is_enabled and settings.training.ckpt_format != "mca":
        yield f"an adapter is not written as {settings.training.ckpt_format}; remove ckpt_format and async_save"


def columns(task: Task, settings: Settings) -> Iterator[str]:
    """Yield an error for column keys that neither the kind of run nor a configured format reads."""
    if unused := [key for key in settings.values if key in task.unused_columns]:
        yield f"{', '.join(unused)}: mca-train {task.name} does not read it; remove the key"
    data = settings.data
    formats = [entry.get("format") or data.data_format for entry in data.datasets]
    if data.eval_file or not formats:
        formats.append(data.data_format)
    if any(name not in ONE_ANSWER for name in formats):
        return  # inferred from the columns, or unknown and reported elsewhere
    named = [name for name in ONE_ANSWER if name in formats]
    pairs = isinstance(data, PairArguments)  # pairs read answers in every format, and the prompt in none
    read = {"tools_column"} if pairs else {column for name in named for column in FORMAT_COLUMNS[name]}
    choosing = {column for columns in FORMAT_COLUMNS.values() for column in columns} - {*task.unused_columns}
    if unread := [key for key in settings.values if key in choosing - read]:
        yield f"{', '.join(unread)}: format {', '.join(named)} does not read it; remove one of the two"


def metric(task: Task, settings: Settings) -> Iterator[str]:
    """Yield a metric_for_best_model that the kind of run does not evaluate."""
    name = (settings.training.metric_for_best_model or "loss").removeprefix("eval_")
    known = ("loss", *TIMES, *task.metric_names)
    if name not in known:
        yield f"metric_for_best_model is {name!r}; mca-train {task.name} evaluates {', '.join(known)}"


KEY_RULES: tuple[Callable[[Task, Settings], Iterable[str]], ...] = (
    sources,
    streaming,
    evaluation,
    adapter_keys,
    lambda task, settings: task.problems(settings),
    columns,
    metric,
)
"""Rules from the keys alone."""


def data_files(task: Task, settings: Settings) -> Iterator[str]:
    """Yield problems of data files (unset, missing, unreadable) and of entries of ``datasets``."""
    data = settings.data
    if not data.train_file and not data.datasets:
        yield "train_file is not set; name a file with rows, or several sources under datasets"
    yield from _source_problems(data)
    for key, files in (("train_file", data.train_file), ("eval_file", data.eval_file)):
        for file in files:
            yield from raised_problems(check_file, file, key)


def _source_problems(data: DataArguments) -> Iterator[str]:
    try:
        sources = parse_sources(data.datasets)
    except McaError as error:
        yield from list_problems(error)
        return
    for source in sources:
        if is_url(source.path):
            yield from raised_problems(require_client, source.path, "datasets")
        elif source.names_file and not Path(f"{source.path}.idx").is_file():  # else an indexed dataset
            yield from raised_problems(check_file, source.path, f"datasets, {source.display_name}")


def directories(task: Task, settings: Settings) -> Iterator[str]:
    """Report missing directories of adapters and reference models."""
    for holder in (settings.lora, settings.own):
        for key in getattr(holder, "__dataclass_fields__", ()):
            path = getattr(holder, key) if key.endswith("_name_or_path") else None
            if path is not None and not Path(path).is_dir():
                yield f"{key}: directory {path} does not exist"


def output_dir(task: Task, settings: Settings) -> Iterator[str]:
    """Report an ``output_dir`` that cannot be used or written."""
    folder, data = Path(settings.training.output_dir), settings.data
    read = (data.model_name_or_path, data.tokenizer_name_or_path, settings.lora.adapter_name_or_path)
    problems = list(raised_problems(require_usable, folder, read))
    if not problems and os.environ.get("RANK", "0") == "0":
        problems += raised_problems(require_writable, folder)
    yield from problems


def start(task: Task, settings: Settings) -> Iterator[str]:
    """Report a missing ``resume_from_checkpoint``, and an ``output_dir`` of another run."""
    yield from raised_problems(require_start, settings)


def require_start(settings: Settings) -> None:
    """Check ``output_dir`` and ``resume_from_checkpoint``; the ranks check the contents of a checkpoint.

    Raises:
        McaError: ``output_dir`` is of another run, or the checkpoint does not exist.
    """
    args, folder = settings.training, Path(settings.training.output_dir)
    checkpoint = resolve(args.resume_from_checkpoint, folder)
    require_free(folder, checkpoint, overwrite=args.overwrite_output_dir)


def require_writable(folder: Path) -> None:
    """Create and write ``output_dir`` as a check, and remove it again if it did not exist.

    Raises:
        McaError: The directory cannot be written.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise McaError(
            f"output_dir: {folder} cannot be written ({reason}); name another directory"
        ) from error
    finally:
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()


def model_side_files(task: Task, settings: Settings) -> Iterator[str]:
    """Report side files of the model that cannot be copied into checkpoints."""
    model, lora = Path(settings.data.model_name_or_path), settings.lora
    adapts = lora.is_enabled or lora.adapter_name_or_path is not None
    if model.is_dir() and not adapts and os.environ.get("RANK", "0") == "0":
        yield from raised_problems(side_files, model)


def weights_problems(task: Task, settings: Settings) -> Iterator[str]:
    """Report missing and truncated Hugging Face files of the model and the reference model; the ranks read them.

    Only headers are read. It is no rule of `FILE_RULES`, which also check a model of the Hub before the rest of its
    files is downloaded.
    """
    model, reference = settings.data.model_name_or_path, task.reference(settings)
    for path, where in {reference: "reference_model_name_or_path: ", model: ""}.items():
        if path is not None and Path(path).is_dir():
            yield from (f"{where}{problem}" for problem in raised_problems(_require_shards, Path(path)))


def _require_shards(model: Path) -> None:
    """Check the weights of directory ``model`` that a run would read, if it has any in safetensors."""
    if checkpoint_kind(model) is not CheckpointKind.HF:
        return
    files = [model / SINGLE] if has_entry(model, SINGLE) else []
    if not files and has_entry(model, INDEX) and any(model.glob("*.safetensors")):
        files = [*indexed_files(model)[1].values()]
    raise_problems([problem for file in files for problem in raised_problems(read_header, file)], model)


FILE_RULES: tuple[Callable[[Task, Settings], Iterable[str]], ...] = (
    data_files,
    directories,
    output_dir,
    start,
    model_side_files,
    lambda task, settings: tokenizer_problems(settings.data),
    lambda task, settings: optimizer_problems(settings.training),
)


_FILE = "tokenizer.json"
_BEGINNINGS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_ENDINGS = (".model", ".spm", ".tiktoken")
_ALONE = {"config.json", "generation_config.json", "mca_config.json", "latest_checkpointed_iteration.txt"}
"""Files of a Hub model that a plan downloads."""


def tokenizer_problems(data: DataArguments) -> Iterator[str]:
    """Yield problems of the tokenizer that file names and ``tokenizer.json`` show."""
    folder = _folder(data)
    if not folder.is_dir():
        if data.tokenizer_name_or_path is not None and not is_hub_id(folder):
            yield f"tokenizer_name_or_path: directory {folder} does not exist"
        return  # a Hub id in plans; a missing model directory is reported with the architecture
    names = {entry.name for entry in folder.iterdir()}
    if data.tokenizer_name_or_path is None and names <= _ALONE:
        return
    if not any(name.startswith(_BEGINNINGS) or name.endswith(_ENDINGS) for name in names):
        yield f"no tokenizer in {folder} (set tokenizer_name_or_path)"
    yield from raised_problems(_count, folder)


def vocabulary_problems(settings: Settings, rows: int) -> Iterator[str]:
    """Report tokens beyond the model's ``rows`` vocabulary rows, which an adapter cannot train."""
    try:
        tokens = _count(_folder(settings.data)) if settings.lora.is_enabled else None
    except McaError:
        return  # reported by `tokenizer_problems`
    if tokens is not None and (problem := growth_problem(settings, tokens, rows)):
        yield problem


def growth_problem(settings: Settings, tokens: int, rows: int) -> str | None:
    """Return the problem of extending a vocabulary of ``rows`` to the tokenizer's ``tokens``; None: there is none."""
    if tokens <= rows or not settings.lora.is_enabled:
        return None
    path = settings.data.model_name_or_path
    return (
        f"the tokenizer has {tokens} tokens, the model's vocabulary {rows}, and an adapter does not contain the new "
        f"rows; write a larger base model first: AutoModel.from_pretrained({path!r}, vocab_size={tokens})"
        ".save_pretrained_as_hf(...)"
    )


def _folder(data: DataArguments) -> Path:
    return Path(data.tokenizer_name_or_path or data.model_name_or_path)


def _count(folder: Path) -> int | None:
    """Return the number of tokens in ``tokenizer.json`` of ``folder``; None: no such file, or an unknown format.

    Raises:
        McaError: The file is not valid JSON.
    """
    file = folder / _FILE
    return _count_tokens(file, file.stat().st_mtime_ns) if file.is_file() else None


@cache
def _count_tokens(file: Path, changed: int) -> int | None:
    """Return the number of tokens, cached by the file's time of change because a layout search needs it often."""
    document = read_json(file, "a tokenizer")
    vocabulary = (document.get("model") or {}).get("vocab")
    added = document.get("added_tokens") or []
    if isinstance(vocabulary, dict):
        names = set(vocabulary)
    elif isinstance(vocabulary, list) and all(isinstance(piece, list) and piece for piece in vocabulary):
        names = {piece[0] for piece in vocabulary}
    else:
        return None
    return len(names | {str(token.get("content")) for token in added})


_READ = 10 << 20
"""Bytes of a file whose rows decide its columns: `datasets` takes them from a first block of this size."""


def column_problems(task: Task, data: DataArguments) -> Iterator[str]:
    """Yield an error for files of the data options without the columns that ``task`` reads.

    Files whose columns cannot be read here are checked when they are loaded.
    """
    for key, files in (("train_file", data.train_file), ("eval_file", data.eval_file)):
        columns = {file: read_columns(file, key) for file in files}
        known = {file: names for file, names in columns.items() if names is not None}
        if known and len(known) == len(columns):
            yield from raised_problems(_check, task, data, key, known)
    yield from raised_problems(_check_sources, task, data)


def _check_sources(task: Task, data: DataArguments) -> None:
    """Raise an error for entries of ``datasets``, all of them local files, with rows that ``task`` cannot read."""
    try:
        sources = parse_sources(data.datasets)
    except McaError:  # `data_files` reports it
        return
    columns = []
    for source in sources:
        names = read_columns(source.path, "datasets")
        if names is None or not {*source.columns.values()} <= {*names}:
            return  # reported when the rows are loaded
        new = {theirs: ours for ours, theirs in source.columns.items()}
        columns.append(
            {new.get(name, name): name for name in names if name in new or name not in new.values()}
        )
    present = {name for renamed in columns for name in renamed}
    for source, renamed in zip(sources, columns, strict=True):
        key, names = f"datasets, {source.display_name}", tuple(renamed)
        arguments = source_arguments(source, data, names, present, key)
        task.check_columns(names, arguments, key)
        row = _first_row(source.path)
        row = {ours: row[theirs] for ours, theirs in renamed.items() if theirs in row}
        if task.needs_chat_template(names, arguments, key, row):
            _require_chat_template(_folder(data))


def _check(task: Task, data: DataArguments, key: str, columns: dict[str, tuple[str, ...]]) -> None:
    for file, names in columns.items():
        require_column(names, task.required_column(data), f"{key}: {file}")
    names = tuple(dict.fromkeys(name for found in columns.values() for name in found))
    arguments = evaluation_arguments(data, names) if key == "eval_file" else data
    task.check_columns(names, arguments, key)
    if any(task.needs_chat_template(names, arguments, key, _first_row(file)) for file in columns):
        _require_chat_template(_folder(data))


def _require_chat_template(folder: Path) -> None:
    """Raise an error for a tokenizer whose files surely have no chat template.

    Raises:
        McaError: There is none.
    """
    file = folder / "tokenizer_config.json"
    if not file.is_file() or any(folder.glob("*chat_template*")) or (folder / "tekken.json").is_file():
        return
    if not read_json(file, "a tokenizer's configuration").get("chat_template"):
        raise McaError(f"{folder}: {NO_TEMPLATE}")


def read_columns(file: str, key: str) -> tuple[str, ...] | None:
    """Return the columns of a local file; None if it is a list of rows or compressed, or cannot be read."""
    if is_url(file) or not Path(file).is_file():
        return None
    try:
        check_file(file, key)
        kind = reader_name(file)
        if kind == "text":
            return ("text",)
        if Path(file).suffix.lower() in COMPRESSED:
            return None  # they are read once, with their rows
        if kind in ("parquet", "arrow"):
            return _schema(file, kind)
        with Path(file).open(encoding="utf-8-sig") as lines:
            return _keys(lines)
    except (OSError, ValueError, RecursionError):
        return None


def _first_row(file: str) -> Values:
    """Return the first row of a file of JSON lines; empty for other files."""
    if reader_name(file) != "json":
        return {}
    with Path(file).open(encoding="utf-8-sig") as lines:
        row = json.loads(next((line for line in lines if line.strip()), "{}"))
    return row if isinstance(row, dict) else {}


def _schema(file: str, kind: str) -> tuple[str, ...]:
    """Return the columns of a Parquet or Arrow file; pyarrow's import takes 0.3 s of a CPU."""
    if kind == "parquet":
        from pyarrow import parquet

        return tuple(parquet.read_schema(file).names)
    from pyarrow import ArrowInvalid, ipc, memory_map

    with memory_map(file) as source:
        try:
            return tuple(ipc.open_stream(source).schema.names)
        except ArrowInvalid:  # the format of files, which has an index at its end
            return tuple(ipc.open_file(source).schema.names)


def _keys(lines: TextIO) -> tuple[str, ...] | None:
    """Return all keys of the rows in the first block; None if a line is no row, or longer than the block."""
    names: dict[str, None] = {}
    size = 0
    while size < _READ and (line := lines.readline(_READ)):
        if line.strip():
            if not line.lstrip().startswith("{") or len(line) == _READ:
                return None
            names.update(dict.fromkeys(json.loads(line)))
        size += len(line)
    return tuple(names) or None
