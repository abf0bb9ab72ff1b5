"""Errors for options of LLaMA-Factory that its workflow on ``mcore_adapter`` ignores, or that mca does not have."""

from collections.abc import Iterator, Mapping

from mca_config.errors import raise_problems
from mca_config.types import Values

_HF = "remove it, or run LLaMA-Factory without USE_MCA"
_OPTIMIZER = "set optimizer (adam, sgd, muon)"
_ADAPTER = "merge the adapters into one"
_UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon"), _OPTIMIZER),
    **dict.fromkeys(("use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_llama_pro"), _HF),
    **dict.fromkeys(("loraplus_lr_ratio", "pissa_init", "pissa_convert"), _HF),
    **dict.fromkeys(("pref_bco_weight", "ld_alpha", "compute_accuracy"), _HF),
    **dict.fromkeys(("quantization_bit", "use_unsloth", "use_unsloth_gc", "use_kt", "use_v1_kernels"), _HF),
    **dict.fromkeys(("shift_attn", "mixture_of_depths", "enable_liger_kernel", "train_from_scratch"), _HF),
    **dict.fromkeys(("upcast_layernorm", "upcast_lmhead_output"), _HF),
    "ref_model": "remove it: the reference is the initial model",
    "ref_model_adapters": "remove it: the reference is the initial model",
    "cache_dir": "set the variable HF_HUB_CACHE to that directory",
    "pure_bf16": "set bf16: true",
    "moe_aux_loss_coef": "set moe_aux_loss_coeff",
    "resize_vocab": "resize the checkpoint first (mca-train sft does it at load)",
    "rope_scaling": "set rope_scaling in the checkpoint's config.json",
}
"""Options that change the result, with the remedy."""


def problems(client: Values, args: Values) -> Iterator[str]:
    """Yield an error for each option of the client that is set and unsupported.

    Args:
        client: LLaMA-Factory's model, data and finetuning arguments.
        args: The training arguments.
    """
    for name, remedy in _UNSUPPORTED.items():
        if value := client.get(name):
            yield f"{name}: {value} is not supported by the mcore_adapter facade; {remedy}"
    stage, method = client.get("stage", "sft"), client.get("finetuning_type", "full")
    if method not in ("full", "lora"):
        yield f"finetuning_type: {method} is not supported by the mcore_adapter facade; set full or lora"
    if (revision := client.get("model_revision", "main")) != "main":
        yield (
            f"model_revision: {revision} is not supported by the mcore_adapter facade, which would load main; "
            "download that revision and set model_name_or_path to its directory"
        )
    if method == "lora" and (
        client.get("create_new_adapter") or len(client["adapter_name_or_path"] or ()) > 1
    ):
        yield f"a new adapter in addition to others is not supported by the mcore_adapter facade; {_ADAPTER}"
    if client.get("ignore_pad_token_for_loss") is False:
        yield "ignore_pad_token_for_loss: false is not supported by the mcore_adapter facade; remove it"
    if stage == "sft" and client.get("packing") and not client.get("neat_packing"):
        yield (
            "packing: true without neat_packing lets samples attend to each other with positions that restart, "
            "which Megatron does not have; set neat_packing: true"
        )
    if client and stage != "pt" and not args.get("do_train"):
        yield f"do_train: false is ignored by LLaMA-Factory's {stage} workflow; set do_train: true"
    if client and args.get("do_eval") and args.get("eval_strategy") == "no":
        yield "do_eval without eval_strategy is ignored by LLaMA-Factory's workflow; set eval_strategy: steps or epoch"


def reject_unsupported(client: Values, args: Values) -> None:
    """Raise one error that names every unsupported option; see `problems`.

    Raises:
        McaError: An option is unsupported.
    """
    raise_problems(problems(client, args), "LLaMA-Factory")
