"""What a YAML file says besides the training and parallel arguments: the model, the data, the ranks."""

from dataclasses import dataclass, field

from mca_config.errors import McaError


@dataclass(kw_only=True)
class DataArguments:
    """The model, its tokenizer and the files to train on."""

    model_name_or_path: str = field(metadata={"help": "Directory of the model: Hugging Face or MCA."})
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Directory of the tokenizer; None: the model's."}
    )
    train_file: list[str] = field(
        default_factory=list,
        metadata={"help": "Training file(s): .jsonl, .json, .parquet or .txt. Several are concatenated."},
    )
    eval_file: list[str] = field(default_factory=list, metadata={"help": "Evaluation file(s), same formats."})
    seq_length: int = field(
        default=2048,
        metadata={"help": "pretrain: tokens per block. sft: longest sample; longer ones are cut at the end."},
    )
    text_column: str = field(default="text", metadata={"help": "Column with plain text."})
    prompt_column: str = field(default="prompt", metadata={"help": "Column with the prompt (sft)."})
    completion_column: str = field(default="completion", metadata={"help": "Column with the answer (sft)."})
    messages_column: str = field(default="messages", metadata={"help": "Column with chat messages (sft)."})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Rows of the training files to use; None: all."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Rows of the evaluation files to use; None: all."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenize; None: one."}
    )

    def __post_init__(self) -> None:
        if self.seq_length < 2:
            raise McaError(f"seq_length is {self.seq_length}; expected at least 2")
        for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise McaError(f"{name} is {value}; expected a positive number or null")


@dataclass(kw_only=True)
class LaunchArguments:
    """How many ranks ``mca-train`` starts on this machine. Ignored under torchrun."""

    local_ranks: int | None = field(
        default=None,
        metadata={
            "help": "Ranks to start here; None: every visible GPU, or without a GPU the fewest that the "
            "layout needs (one data-parallel replica)."
        },
    )

    def __post_init__(self) -> None:
        if self.local_ranks is not None and self.local_ranks < 1:
            raise McaError(f"local_ranks is {self.local_ranks}; expected at least 1")
