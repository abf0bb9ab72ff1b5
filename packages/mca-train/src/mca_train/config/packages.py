"""Packages that the optimizer and the layers of a run need; nothing is imported, so that an error comes at once."""

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mca_config.arguments import transformer_engine_options

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

_MEGATRON_WITH_MUON = (0, 19)


def optimizer_problems(args: "TrainingArguments") -> Iterator[str]:
    """Yield an error for each requirement of Megatron's optimizer that this installation lacks."""
    precise = args.use_precision_aware_optimizer and not args.optimizer_cpu_offload
    if precise and find_spec("transformer_engine") is None:
        yield (
            "use_precision_aware_optimizer needs Transformer Engine's Adam, which is not installed, or "
            "optimizer_cpu_offload; remove it"
        )
    if args.optimizer == "muon":
        if tuple(map(int, version("megatron-core").split(".")[:2])) < _MEGATRON_WITH_MUON:
            yield (
                "optimizer muon needs megatron-core 0.19 or later (earlier ones cannot build it, or split queries, "
                "keys and values by other heads than the layer's) and Python 3.12; install them, or use adam or sgd"
            )
        elif find_spec("emerging_optimizers") is None:
            yield (
                "optimizer muon needs emerging-optimizers, which needs Python 3.12; install mca-train[muon] there, "
                "or use adam or sgd"
            )


def engine_problems(args: "TrainingArguments") -> Iterator[str]:
    """Yield an error for options of Transformer Engine's layers if it is not installed."""
    if args.transformer_impl == "local" or find_spec("transformer_engine") is not None:
        return
    options = transformer_engine_options(args.transformer_config_overrides())
    if args.transformer_impl == "transformer_engine":
        options.insert(0, "transformer_impl transformer_engine")
    if options:
        keys = ", ".join(option.split()[0] for option in options)
        yield (
            f"{', '.join(options)}: needs Transformer Engine, which is not installed; install mca-models[te] on a "
            f"machine with a GPU, or remove {keys}"
        )
