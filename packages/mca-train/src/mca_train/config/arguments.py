"""Arguments of a run: model, data, ranks and adapter.

These classes check single values; `mca_train.run.rules` checks combinations. Arguments of one kind of run are in its
file in ``tasks``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from mca_config.errors import McaError
from mca_config.types import JsonObject, Typed


def option(help: str, default: Typed = None) -> Typed:
    """Return a dataclass field with a help text."""
    return field(default=default, metadata={"help": help})


class DefaultColumn(str):
    """Default name of a column, which rows may lack; a plain `str` is the user's, and its column must exist."""

    __slots__ = ()


def explicit_columns(arguments: object) -> frozenset[str]:
    """Return the keys of ``arguments`` with a column name that the user has set."""
    return frozenset(key for key, name in column_keys(arguments) if not isinstance(name, DefaultColumn))


def column_keys(arguments: object) -> Iterable[tuple[str, str]]:
    """Return the keys that name a column, with the names."""
    return [(key, name) for key, name in vars(arguments).items() if key.endswith("_column")]


@dataclass(kw_only=True)
class DataArguments:
    """The model, its tokenizer and the files to train on."""

    model_name_or_path: str = field(
        metadata={
            "help": "Model: a Hugging Face or MCA directory, or a Hub id (org/name, org/name@revision)."
        }
    )
    tokenizer_name_or_path: str | None = option("Directory or Hub id of the tokenizer; None: the model's.")
    train_file: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Training files, concatenated: .jsonl, .json, .parquet, .arrow or .txt, on disk or at an address "
            "(s3://...). The first two also as .gz, .bz2, .xz or .zst."
        },
    )
    datasets: list[dict[str, Any]] = field(
        default_factory=list,
        metadata={
            "help": "Weighted sources instead of train_file, a list of mappings. Their keys: path, name, split, "
            "subset, revision, columns, format, weight, max_samples."
        },
    )
    eval_file: list[str] = field(
        default_factory=list, metadata={"help": "Evaluation files, in the same formats."}
    )
    seq_length: int = option(
        "Tokens per block (pretrain), pack (sequence_packing) or longest sequence; longer ones are cut.",
        2048,
    )
    text_column: str = option("Column with plain text (all kinds but dpo and reward).", DefaultColumn("text"))
    prompt_column: str = option("Column with the prompt (sft, kto, dpo, reward).", DefaultColumn("prompt"))
    completion_column: str = option("Column with the answer (sft, kto).", DefaultColumn("completion"))
    tools_column: str = option(
        "Column with the tools for the chat template (all kinds but pretrain).", DefaultColumn("tools")
    )
    messages_column: str = option(
        "Column with chat messages (sft, kto, classify).", DefaultColumn("messages")
    )
    images_column: str = option(
        "Column with images, for <image> and parts of type image.", DefaultColumn("images")
    )
    videos_column: str = option(
        "Column with videos, for <video> and parts of type video.", DefaultColumn("videos")
    )
    video_fps: float | None = option(
        "Frames per second that the model sees; None: as its processor, or 2 (Qwen3-Omni: 1; MiniCPM-V: always 1)."
    )
    video_max_frames: int | None = option(
        "Most frames of a video that the model sees; None: as its processor (often 768)."
    )
    video_max_seconds: float | None = option("Longest video; a longer one is an error. None: any.")
    use_audio_in_video: bool = option(
        "Use the sound of videos (Qwen2.5-Omni, Qwen3-Omni); needs the extra audio.",
        False,
    )
    audios_column: str = option(
        "Column with audio clips, for <audio> and parts of type audio.", DefaultColumn("audios")
    )
    audio_max_seconds: float | None = option(
        "Longest audio clip; a longer one is an error. None: as the model hears."
    )
    image_folder: str | None = option("Directory of relative paths of media; None: that of the data file.")
    data_format: Literal["messages", "prompt_completion", "text", "alpaca", "sharegpt"] | None = option(
        "Format of the rows (sft, kto; dpo and reward: alpaca or sharegpt); None: by their columns."
    )
    max_train_samples: int | None = option("Rows of the training files to use; None: all.")
    max_eval_samples: int | None = option("Rows of the evaluation files to use; None: all.")
    preprocessing_num_workers: int | None = option("Processes that tokenize; None: one.")
    tokenized_cache: str | None = option(
        "Directory that keeps tokenized samples for other ranks and runs; None: tokenize again."
    )
    streaming: bool = option("Read the training files during training; needs max_steps.", False)
    shuffle_buffer_size: int = option("With streaming, rows in the shuffle buffer; 1: in order.", 1000)

    def __post_init__(self) -> None:
        if self.seq_length < 2:
            raise McaError(f"seq_length is {self.seq_length}; expected at least 2")
        if self.shuffle_buffer_size < 1:
            raise McaError(f"shuffle_buffer_size is {self.shuffle_buffer_size}; expected at least 1")
        if self.streaming and self.preprocessing_num_workers:
            raise McaError(
                "preprocessing_num_workers does nothing with streaming; set dataloader_num_workers"
            )
        whole = ("max_train_samples", "max_eval_samples", "preprocessing_num_workers", "video_max_frames")
        for name in (*whole, *VIDEO_KEYS, "audio_max_seconds"):
            value = getattr(self, name)
            if value is not None and not (value >= 1 if name in whole else 0 < value < float("inf")):
                raise McaError(f"{name} is {value}; expected a positive number or null")


VIDEO_KEYS = ("video_fps", "video_max_frames", "video_max_seconds")
"""Keys that choose the frames of videos."""


@dataclass(kw_only=True)
class PairArguments(DataArguments):
    """Data arguments of a run on preference pairs."""

    chosen_column: str = option("Column with the better answer.", DefaultColumn("chosen"))
    rejected_column: str = option("Column with the worse answer.", DefaultColumn("rejected"))


@dataclass(kw_only=True)
class RewardArguments(PairArguments):
    """Data arguments of a reward model."""

    margin_column: str = option(
        "Column with how much better the better answer is; may be missing.", DefaultColumn("margin")
    )


@dataclass(kw_only=True)
class ClassifyArguments(DataArguments):
    """Data arguments of texts with labels."""

    label_column: str = option(
        "Column with the class, labels or numbers (classify), or whether the answer is good (kto).",
        DefaultColumn("label"),
    )


@dataclass(kw_only=True)
class LaunchArguments:
    """Number of ranks that ``mca-train`` starts on this machine. Ignored under torchrun."""

    nproc_per_node: int | None = option(
        "Ranks to start on this machine; None: every visible GPU, or without GPUs the fewest that the layout needs."
    )

    def __post_init__(self) -> None:
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise McaError(f"nproc_per_node is {self.nproc_per_node}; expected at least 1")


@dataclass(kw_only=True)
class LoraArguments:
    """A LoRA adapter to train instead of full fine-tuning."""

    lora_rank: int | None = option("Rank of a new adapter; None: full fine-tuning.")
    lora_alpha: float = option("Scale: lora_alpha / lora_rank.", 16)
    lora_dropout: float = option("Dropout of the adapter's inputs.", 0.0)
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Hugging Face names of linears (q_proj, ...), or all-linear."},
    )
    lora_target_parameters: list[str] = field(
        default_factory=list,
        metadata={"help": "Names of bare weights, such as stacked experts (mlp.experts.down_proj)."},
    )
    lora_modules_to_save: list[str] = field(
        default_factory=list,
        metadata={"help": "Modules that are trained completely and saved with the adapter."},
    )
    use_rslora: bool = option("Scale by lora_alpha / sqrt(lora_rank).", False)
    adapter_name_or_path: str | None = option(
        "PEFT or MCA adapter to train further: a directory or a Hub id."
    )

    def __post_init__(self) -> None:
        if self.lora_rank is not None and self.lora_rank < 1:
            raise McaError(f"lora_rank is {self.lora_rank}; expected at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise McaError(f"lora_dropout is {self.lora_dropout}; expected 0 or more and below 1")
        if self.lora_rank is not None and self.adapter_name_or_path is not None:
            raise McaError(
                "lora_rank creates a new adapter, adapter_name_or_path continues one; remove one of the two"
            )

    @property
    def is_enabled(self) -> bool:
        """Return whether an adapter is trained."""
        return self.lora_rank is not None or self.adapter_name_or_path is not None

    def config(self, task_type: str = "CAUSAL_LM") -> JsonObject:
        """Return the contents of ``adapter_config.json``; ``task_type`` is PEFT's name of the model's kind."""
        targets = self.lora_target_modules
        document: JsonObject = {
            "peft_type": "LORA",
            "task_type": task_type,
            "r": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": targets[0] if targets == ["all-linear"] else targets,
            "use_rslora": self.use_rslora,
            "bias": "none",
        }
        optional = {
            "target_parameters": self.lora_target_parameters,
            "modules_to_save": self.lora_modules_to_save,
        }
        return document | {name: value for name, value in optional.items() if value}
