"""``mca-train data`` prints what a model would see of a run's data. No model is read, nothing is trained."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import UsageError, checking_usage, raise_problems
from mca_config.printable import counted
from mca_train.config.model import model_config
from mca_train.config.run_config import Settings, given_values
from mca_train.data.kept_warnings import KeptWarnings
from mca_train.run.checks import data_problems, settings_of
from mca_train.run.hub_paths import with_directories
from mca_train.run.inputs import image_reader, load_tokenizer
from mca_train.run.logs import quiet_libraries
from mca_train.tasks.load import load_first, load_mixture, load_tokenized
from mca_train.tasks.table import task_of
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.mixture import Mixture
    from mca_train.data.preferences import PairDataset
    from mca_train.data.token_dataset import TokenDataset

_ROWS_OF_A_STREAM = 1000


def print_data(task: Task | None, config: Path | None, overrides: list[str]) -> int:
    """Prints counts, lengths, fill and samples of a configuration's data.

    Args:
        task: The kind of run; None: the one whose keys are given.
        config: The YAML file; None: the overrides are all.
        overrides: ``--key value`` words.
    """
    quiet_libraries(first=True)
    values, where = given_values(config, overrides)
    task = task or task_of(values)
    settings = settings_of(task, with_directories(values, only="tokenizer"), where)
    raise_problems(data_problems(settings), where, kind=UsageError)
    with checking_usage():
        tokenizer = load_tokenizer(settings)
    told = KeptWarnings()
    logger = logging.getLogger("mca_train")
    logger.addHandler(told)
    logger.propagate = False
    try:
        _print(task, settings, tokenizer, told)
    finally:
        logger.removeHandler(told)
        logger.propagate = True
    return 0


def _print(task: Task, settings: Settings, tokenizer: "PreTrainedTokenizerBase", told: KeptWarnings) -> None:
    from mca_train.batching.packing import PackedDataset
    from mca_train.data.survey import survey

    args, data = settings.training, settings.data
    seed = args.seed if args.data_seed is None else args.data_seed
    if data.streaming:
        rows = min(data.max_train_samples or _ROWS_OF_A_STREAM, _ROWS_OF_A_STREAM)
        data = replace(data, max_train_samples=rows)
        sys.stdout.write(f"streaming: the first {counted(rows, 'row')}\n")
    images = None
    if Path(data.model_name_or_path).is_dir():  # else rows with images are refused
        model = model_config(data.model_name_or_path)
        images, data = image_reader(settings, model), task.data_of(data, model)
    for key, files in (
        ("train_file", data.train_file),
        ("datasets", data.datasets),
        ("eval_file", data.eval_file),
    ):
        if not files:
            continue
        samples: Mixture | TokenDataset | PairDataset
        if key == "datasets":
            mixture = samples = load_mixture(task, tokenizer, data, seed=seed, images=images)
            told.lines.append(mixture.described())
        elif key == "train_file" and data.streaming:
            samples = load_first(task, [str(file) for file in files], tokenizer, data, images=images)
        else:
            samples = load_tokenized(
                task,
                [str(file) for file in files],
                tokenizer,
                data,
                evaluation=key == "eval_file",
                images=images,
            )
        sys.stdout.write(f"\n{key}, mca-train {task.name}\n" + survey(samples, tokenizer))
        if args.sequence_packing:
            length, parts = data.seq_length * task.sequences_per_sample, args.context_parallel_size or 1
            in_order = key == "eval_file" or args.train_sampling_strategy != "random"
            packs = PackedDataset(
                samples,
                length,
                multiple=2 * parts if parts > 1 else 1,
                seed=None if in_order else seed,
                name=key,
            )
            told.lines.append(f"packing: {packs.fill}")
        sys.stdout.write("".join(["\n", *(f"{line}\n" for line in told.lines)]) if told.lines else "")
        told.lines.clear()
