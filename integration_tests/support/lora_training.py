"""A few training steps of a LoRA adapter, by ``peft`` on the HF model and by Megatron on ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STEPS, LEARNING_RATE = 3, 2e-3  # large steps make rounding errors grow


def tokens() -> torch.Tensor:
    return torch.randint(0, 70, (4, 24), generator=torch.Generator().manual_seed(7))


def hf_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(tokens(), use_cache=False).logits
    return logits


def train_peft(model: Any) -> None:
    """``STEPS`` of AdamW on the mean next-token loss of one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)
    batch = tokens()
    for _ in range(STEPS):
        logits = model(batch, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_megatron(models: Any) -> None:
    """The same through Megatron's schedule, gradient buffers and reductions."""
    wrapped = _with_gradient_buffers(models)
    trained = [p for p in models.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE) if trained else None
    models.train()
    for _ in range(STEPS):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        _forward_backward(models, wrapped)
        for parameter in trained:
            parameter.grad = parameter.main_grad.clone()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()  # a gradient left there would be added to the next


def _with_gradient_buffers(models: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    models.megatron.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return [DistributedDataParallel(models.megatron, settings, chunk) for chunk in models.chunks]


def _forward_backward(models: Any, wrapped: list[Any]) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mca_models.megatron import platform
    from mca_models.megatron.distributed import parallel
    from mca_models.megatron.layers.zigzag import take_rank_tokens

    batch, size = tokens().to(platform.current_device()), 2
    group, length = parallel.context_group(), batch.shape[1]
    whole = [
        {
            "ids": rows,
            "labels": rows.roll(-1, 1),
            "positions": torch.arange(length, device=batch.device).expand(size, -1),
            "weights": (torch.arange(length, device=batch.device) < length - 1).expand(size, -1)
            / (length - 1)
            / size,
        }
        for rows in batch.split(size)
    ]
    parts = [
        {name: take_rank_tokens(x, 1, group.rank(), group.size()) for name, x in each.items()}
        for each in whole
    ]
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(parts) for _ in wrapped],
        model=wrapped,
        num_microbatches=len(parts),
        seq_length=batch.shape[1],
        micro_batch_size=size,
        forward_only=False,
    )


def _forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    part = next(iterator)
    output = model(part["ids"], part["positions"], None, labels=part["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = (losses * part["weights"]).sum()  # this context rank's part of it
        return mean, {"loss": mean.detach()}

    return output, loss


def adapter_of(base: Path, folder: Path, settings: dict[str, Any], *, train: bool = True) -> dict[str, Any]:
    """Return ``peft``'s adapter of ``settings`` on the model in ``base``: directories, logits before and after.

    Without training: the gradients instead.
    """
    import peft
    import transformers

    model = (
        transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float().eval()
    )
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, **settings})
    torch.manual_seed(5)
    lora = peft.get_peft_model(model, config)
    found: dict[str, Any] = {"adapter": folder / "adapter", "before": hf_logits(lora)}
    lora.save_pretrained(folder / "adapter")
    if train:
        lora.train()
        train_peft(lora)
        lora.eval()
        found |= {"after": hf_logits(lora), "trained": folder / "trained"}
        lora.save_pretrained(folder / "trained")
    else:
        found["gradients"] = adapter_gradients(lora.eval())  # seed_oss has dropout
    return found


def loaded_logits(base: Path, adapter: Path) -> torch.Tensor:
    """Return the logits of plain transformers with ``peft``."""
    import peft
    import transformers

    model = (
        transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float().eval()
    )
    return hf_logits(peft.PeftModel.from_pretrained(model, adapter).eval())


def adapter_gradients(lora: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of a ``PeftModel``'s trained tensors by their names in its file, after one backward pass."""
    batch = tokens()
    logits = lora(batch, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    values = {name: p.grad for name, p in lora.named_parameters() if p.grad is not None}
    return {name.replace(".default", "").replace(".modules_to_save", ""): x for name, x in values.items()}


def gradients_of(models: Any) -> None:
    """One backward pass into the parameters' ``main_grad``, in the mode that the chunks are in."""
    wrapped = _with_gradient_buffers(models)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    _forward_backward(models, wrapped)


def megatron_gradients(models: Any) -> dict[str, torch.Tensor] | None:
    """The same through Megatron, put together from all ranks; on rank 0."""
    from mca_models.lora.peft_directory import PeftTensors
    from mca_models.megatron.distributed.collectives import all_gather
    from mca_models.megatron.peft.exchange import whole_adapter

    models.eval()
    gradients_of(models)
    live = [(param, tensor.main_grad if tensor.requires_grad else tensor) for param, tensor in models._live()]
    frozen = [name for param, x in models._live() if not x.requires_grad for name in param.hf_names()]
    left = {name for of_rank in all_gather(frozen) for name in of_rank}
    whole = whole_adapter(live, models.rank_context, models.config, models.adapter, models.rules)
    if whole is None:
        return None
    tensors = PeftTensors(whole)
    return {name: torch.from_numpy(tensors.array(name)) for name in tensors.sources if name not in left}
