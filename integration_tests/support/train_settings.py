"""Settings of the trainer's tests by short names: layouts, how the optimizer is split, and what is saved."""

TP = {"tensor_model_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VPP = PP | {"virtual_pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
DP = {"gradient_accumulation_steps": 2}  # half as many micro-batches on each of two replicas
ETP1, ETP2 = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
ZERO = {"gradient_accumulation_steps": 2, "use_distributed_optimizer": True}
OVERLAP = ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000}
TORCH_DIST = {"ckpt_format": "torch_dist"}
ASYNC = TORCH_DIST | {"async_save": True}
