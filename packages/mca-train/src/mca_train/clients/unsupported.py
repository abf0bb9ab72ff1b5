"""Errors for options of LLaMA-Factory that its workflow on ``mcore_adapter`` ignores, or that mca does not have."""

from collections.abc import Iterator, Mapping

from mca_config.errors import raise_problems
from mca_config.types import Values
from mca_train.clients.llama_factory_keys import DATA, FINETUNING, MEGATRON, MODEL, Key
from mca_train.reference.keys import format_default

_UNSUPPORTED = "is not supported with USE_MCA=1"


def problems(client: Values, args: Values) -> Iterator[str]:
    """Yield an error for each option of the client that is set and unsupported.

    Args:
        client: LLaMA-Factory's model, data and finetuning arguments.
        args: The training arguments.
    """
    yield from _set_keys({**MODEL, **DATA, **FINETUNING}, client)
    stage, method = client.get("stage", "sft"), client.get("finetuning_type", "full")
    if method not in ("full", "lora"):
        yield f"finetuning_type: {method} {_UNSUPPORTED}; set full or lora"
    if method == "lora" and (paths := client["adapter_name_or_path"]):
        if len(paths) > 1:
            yield f"adapter_name_or_path: more than one adapter ({len(paths)}) {_UNSUPPORTED}; merge them into one"
        if client.get("create_new_adapter"):
            yield f"create_new_adapter: true {_UNSUPPORTED} with adapter_name_or_path; merge that adapter first"
    if stage == "sft" and client.get("packing") and not client.get("neat_packing"):
        yield (
            "packing: true without neat_packing lets samples attend to each other with positions that restart, "
            "which Megatron does not have; set neat_packing: true"
        )
    if not client:
        return
    yield from _set_keys(MEGATRON, args)
    if stage != "pt" and not args.get("do_train"):
        yield f"do_train: false is ignored by LLaMA-Factory's {stage} workflow; set do_train: true"
    if args.get("do_eval") and args.get("eval_strategy") == "no":
        yield "do_eval without eval_strategy is ignored by LLaMA-Factory's workflow; set eval_strategy: steps or epoch"


def _set_keys(keys: Mapping[str, Key], values: Values) -> Iterator[str]:
    """Yield an error for each of ``values`` that its row of the table rejects."""
    for name, key in keys.items():
        if name in values and key.rejects(value := values[name]):
            yield f"{name}: {format_default(value)} {_UNSUPPORTED}; {key.note}"


def reject_unsupported(client: Values, args: Values) -> None:
    """Raise one error that names every unsupported option; see `problems`.

    Raises:
        McaError: An option is unsupported.
    """
    raise_problems(problems(client, args), "LLaMA-Factory")
