"""Rules of a run from its keys alone; no machine could follow what they report. They import no torch.

Each rule yields messages. `mca_train.run.rules` has the rules that need transformers, a device or the model.
"""

from collections.abc import Callable, Iterable, Iterator

from mca_train.config.arguments import LoraArguments, PairArguments
from mca_train.config.run_config import Settings
from mca_train.data.formats import FORMAT_COLUMNS, ONE_ANSWER
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
