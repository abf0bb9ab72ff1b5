"""Options of LLaMA-Factory: translation to those of mca's trainers, and errors for unsupported ones.

Unsupported are options that its workflow on ``mcore_adapter`` ignores, or that mca does not have.
"""

from collections.abc import Collection, Iterator, Mapping

from transformers import PreTrainedTokenizerBase

from mca_config.errors import raise_problems
from mca_config.types import JsonObject, Typed, Values
from mca_models.megatron.peft import get_peft_model, load_adapter
from mca_models.megatron.virtual_models import VirtualModels
from mca_models.templates.parts.vision_language import Part, model_parts
from mca_train.batching.collate import CollatorFormat
from mca_train.clients.llama_factory_keys import DATA, FINETUNING, MEGATRON, MODEL, Key
from mca_train.clients.samples import SampleMaker, client_samples
from mca_train.reference.keys import format_default
from mca_train.trainer.base import TrainerOptions

_ARGUMENTS = ("model_args", "data_args", "finetuning_args")
_FREEZE: dict[Part, str] = {
    "vision": "freeze_vision_tower",
    "audio": "freeze_vision_tower",
    "projector": "freeze_multi_modal_projector",
    "language": "freeze_language_model",
}
_UNSUPPORTED = "is not supported with USE_MCA=1"


def client_arguments(options: TrainerOptions) -> JsonObject:
    """Return LLaMA-Factory's model, data and finetuning arguments, which only its last callback has."""
    found: JsonObject = {}
    for callback in options.get("callbacks") or ():
        for arguments in (getattr(callback, name, None) for name in _ARGUMENTS):
            found |= {} if arguments is None else vars(arguments)
    return found


def translate(options: TrainerOptions, tokenizer: PreTrainedTokenizerBase | None) -> TrainerOptions:
    """Return options of mca's trainers.

    Args:
        options: Options of the client; its collator returns labels of the next token.
        tokenizer: Tokenizer, saved with the model.

    Raises:
        McaError: An option of the client is unsupported.
    """
    client, args = client_arguments(options), options["args"]
    reject_unsupported(client, vars(args))
    if client.get("disable_shuffling"):
        args.train_sampling_strategy = "sequential"
    options["processing_class"] = tokenizer
    options["model"] = _trained_model(options["model"], client, args.seed)
    if (collate := options.get("data_collator")) is not None:
        make = SampleMaker(collate=collate, config=options["model"].config)
        options["data_collator"] = None
        options["collator_format"] = CollatorFormat(labels_are_shifted=True)
        options["train_dataset"] = client_samples(options.get("train_dataset"), make)
        options["eval_dataset"] = client_samples(options.get("eval_dataset"), make)
    return options


def _trained_model(model: VirtualModels, client: Values, seed: int) -> VirtualModels:
    """Return ``model`` with the parts frozen that LLaMA-Factory freezes, or with its adapter."""
    if not client:
        return model
    parts = [part for part in model_parts(model.config) if not client[_FREEZE[part]]]
    if client["finetuning_type"] == "lora":
        return _adapted(model, client, seed, parts)
    if model.config.vision is not None:
        model.train_parts(parts)
    return model


def _adapted(
    model: VirtualModels,
    client: Values,
    seed: int,
    parts: Collection[Part],
) -> VirtualModels:
    if paths := client["adapter_name_or_path"]:
        return load_adapter(model, paths[0])
    targets: Typed = client["lora_target"]
    settings = {
        "r": client["lora_rank"],
        "lora_alpha": client["lora_alpha"],
        "lora_dropout": client["lora_dropout"],
        "target_modules": "all-linear" if targets == ["all"] else targets,
        "use_rslora": client["use_rslora"],
        "use_dora": client["use_dora"],
        "modules_to_save": client["additional_target"],
        "task_type": "CAUSAL_LM",
    }
    return get_peft_model(model, settings, seed=seed, parts=parts)


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
