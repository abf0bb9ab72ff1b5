"""Checks for contradictions among the keys of a configuration, independent of the kind of run, model and files."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mca_train.config.arguments import LoraArguments
from mca_train.config.run_config import Settings
from mca_train.lr_schedule import schedule_problems

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments


def contradictions(settings: Settings) -> Iterator[str]:
    """Yield the contradictions among keys that do not depend on the kind of run."""
    values, training, data = settings.values, settings.training, settings.data
    if data.datasets and data.train_file:
        yield "train_file and datasets are both set; name the file as an entry of datasets, or remove one"
    if data.datasets and data.streaming:
        yield "streaming reads train_file, not datasets; remove one of the two"
    if data.datasets and data.max_train_samples is not None:
        yield "max_train_samples is for train_file; set max_samples in the entries of datasets"
    yield from _streaming_problems(settings)
    if values.get("do_train", True) is not True and not training.do_train:
        yield "do_train is false, but mca-train trains; remove it"
    if values.get("do_eval", True) is not True and not training.do_eval and data.eval_file:
        yield "do_eval is false, but eval_file is set, which is evaluated at the end; remove one of the two"
    if not data.eval_file:
        yield from _without_evaluation("do_eval" in values, training)
        if data.max_eval_samples is not None:
            yield "max_eval_samples is set, but eval_file is not; set it or remove max_eval_samples"
    if training.load_best_model_at_end and training.eval_strategy == "no":
        yield (
            "load_best_model_at_end is true, but eval_strategy is no, so there is no best model; set it "
            "or remove the key"
        )
    yield from schedule_problems(training)
    yield from _adapter_problems(settings)
    yield from _backend_problems(values.get("ddp_backend"))


def _streaming_problems(settings: Settings) -> Iterator[str]:
    """Yield problems of streaming: no max_steps, and keys that need or exclude it."""
    training, data = settings.training, settings.data
    if data.streaming and training.max_steps <= 0:
        yield "streaming needs max_steps: a stream has no length"
    if data.streaming and data.tokenized_cache is not None and not data.eval_file:
        yield "tokenized_cache keeps no samples of a stream; remove it or set streaming to false"
    if "shuffle_buffer_size" not in settings.values:
        return
    if not data.streaming:
        yield "shuffle_buffer_size is for streaming, others are shuffled as a whole; remove it or set streaming"
    elif data.shuffle_buffer_size > 1 and str(training.train_sampling_strategy) == "sequential":
        yield "shuffle_buffer_size shuffles, but train_sampling_strategy is sequential; remove one of the two"


def _without_evaluation(says_do_eval: bool, training: "TrainingArguments") -> Iterator[str]:
    settings = {
        f"eval_strategy is {training.eval_strategy.value}": training.eval_strategy != "no",
        "eval_on_start is true": training.eval_on_start,
        "do_eval is true": says_do_eval and training.do_eval and training.eval_strategy == "no",
    }
    yield from (
        f"{setting}, but eval_file is not set; set it or remove {setting.split()[0]}"
        for setting, is_on in settings.items()
        if is_on
    )


def _adapter_problems(settings: Settings) -> Iterator[str]:
    """Yield LoRA keys without effect, because no new adapter is created, and an unsupported checkpoint format."""
    lora = settings.lora
    keys = [key for key in settings.values if key in LoraArguments.__dataclass_fields__]
    unused = [key for key in keys if key not in ("lora_rank", "adapter_name_or_path")]
    if unused and lora.lora_rank is None:
        why = "adapter_name_or_path has its own" if lora.adapter_name_or_path else "lora_rank is not set"
        yield f"{', '.join(unused)}: {why}; remove the key or set lora_rank"
    if lora.is_enabled and settings.training.ckpt_format != "mca":
        yield f"an adapter is not written as {settings.training.ckpt_format}; remove ckpt_format and async_save"


def _backend_problems(backend: object) -> Iterator[str]:
    """Report a ``ddp_backend`` that differs from the backend of this machine."""
    from mca_models.megatron import platform

    expected = platform.backend()
    if backend not in (None, expected):
        yield f"ddp_backend is {backend!r}; ranks of this machine communicate over {expected}; remove it"
