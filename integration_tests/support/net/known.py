"""Cases like those in which the net has found something, whatever is drawn."""

from collections.abc import Mapping

from net.case import Case
from net.faults import small_case

_GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_BALANCE = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
_EXPERTS = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2}
_GATHERED = {"moe_token_dispatcher_type": "allgather", "sequence_packing": True}
_STAGES = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
_GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
_SPLIT = {"use_distributed_optimizer": True}
_OVERLAP = _SPLIT | {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 300}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_RATES = {"decoupled_lr": 6e-3, "decoupled_min_lr": 1e-3, "lr_scheduler_type": "cosine"}
_VIRTUAL = _STAGES | {"virtual_pipeline_model_parallel_size": 2}

KNOWN: Mapping[str, Case] = {
    # losses of experts' scores, of which a router that is limited to groups saw only those of the groups
    "groups": small_case(10, "deepseek_v2", ranks=1, options=_BALANCE, changes=_GROUPS),
    # two models in one process: what Megatron noted in the environment for the first forbade the second
    "local-attention": small_case(11, "llama", ranks=1, options={"attention_backend": "local"}),
    "attention": small_case(12, "llama", ranks=1, options={}),
    # packs held out are not full: ranks that gather all tokens for experts had different numbers of them
    "packed-allgather": small_case(13, "qwen3_moe", options=_EXPERTS | _GATHERED, changes=_FOUR),
    # its first stage has a dense layer only, and did not take part in counting what each expert is sent
    "dense-stage": small_case(14, "deepseek_v2", options=_STAGES | _GLOBAL, changes=_GROUPS),
    # the embedding of MTP layers had another rate than the first rank's
    "prediction-rates": small_case(
        15, "deepseek_v3", ranks=4, prediction=1, options=_STAGES | _SPLIT | _RATES, changes=_GROUPS
    ),
    "prediction-rates-of-one-replica": small_case(
        19, "deepseek_v3", prediction=1, options=_STAGES | _RATES, changes=_GROUPS
    ),
    # a pass that counts what experts are sent comes before parameters are gathered, and through all virtual stages
    "counted-overlap": small_case(
        16,
        "qwen3_moe",
        ranks=4,
        options=_VIRTUAL | _GLOBAL | _OVERLAP,
        changes=_FOUR | {"num_hidden_layers": 4},
    ),
    # MTP layers whose attention has an indexer: they were left behind
    "chosen-keys": small_case(
        17, "deepseek_v32", prediction=1, changes=_GROUPS | {"mlp_layer_types": ["dense", "sparse"]}
    ),
    # what experts give skips a layer, through recomputation layer by layer
    "skipped-layers": small_case(
        18, "longcat_flash", options=_STAGES | _FULL | _SPLIT, changes={"num_hidden_layers": 4}
    ),
}
"""By name."""
