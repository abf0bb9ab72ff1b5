"""Logits, chosen experts and gradients against transformers: in fp32 to the last bits, in bf16 as near as its own."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.gpu_kit.kit import Kit, Layers, of_tests
from tools.gpu_kit.smoke import relative

CASES = ("llama", "gpt_oss", "qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_text")
MORE = ("qwen2-tied", "mistral", "gemma2", "glm4_moe", "olmo2")
TINY = ("qwen2-tied", "qwen3_moe")
EXACT = {"local": 1e-4, "engine": 1e-3}
"""Tolerance in fp32. Transformer Engine asks for products of 10 bits, which NVIDIA_TF32_OVERRIDE=0 forbids."""
HALF = ("llama", "qwen3", "olmo2")
"""Models compared in bf16: without experts, because another choice of experts changes everything after it."""
TIMES = 3.0
"""Errors of bf16 for those of transformers in bf16."""


def fp32(kit: Kit, layers: Layers, *, more: bool = False) -> None:
    """The families of `CASES`, or of `MORE`."""
    settings = kit.settings(layers)
    for case in TINY[:1] if kit.tiny and more else TINY if kit.tiny else MORE if more else CASES:
        reference = of_tests("reference").make_reference(case, kit.scratch, batch=4)
        _exact(kit, reference, layers, settings)


def _exact(kit: Kit, reference: Any, layers: Layers, settings: dict[str, Any]) -> None:
    from mca_models.megatron import AutoModel

    gradients, case = of_tests("gradients"), reference.model
    args = of_tests("layouts").arguments("tp1", attention_dropout=0.0, **settings)
    model: Any = AutoModel.from_pretrained(reference.path, args)
    kit.holds(
        f"{case}: is on {kit.device}", {each.device.type for _, each in model.local_params()} == {kit.device}
    )
    compared = of_tests("routing").compare(model, reference)
    kit.check(f"{case}: logits", compared.difference, EXACT[layers])
    if compared.routed:
        kit.check(f"{case}: tokens at other experts", compared.misrouted, 0)
    expected = gradients.expected_gradients(reference, kit.scratch)
    found = kit.scratch / f"{case}-gradients"
    gradients.export_gradient(reference, "tp1", found, **settings)
    ((name, error), *_) = gradients.worst_errors(expected, found)
    kit.check(f"{case}: gradients, {name} worst", error, EXACT[layers])


def bf16(kit: Kit, layers: Layers) -> None:
    """Dense families: the error against fp32 is at most some times that of transformers in bf16."""
    settings = kit.settings(layers)
    for case in HALF[:1] if kit.tiny else HALF:
        _half(kit, case, settings)


def _half(kit: Kit, case: str, settings: dict[str, Any]) -> None:
    from mca_models.megatron import AutoModel

    gradients, tests = of_tests("gradients"), of_tests("reference")
    reference = tests.make_reference(case, kit.scratch, batch=4)
    read = of_tests("checkpoint_files").read
    exact = read(gradients.expected_gradients(reference, kit.scratch))
    theirs, their_logits = _transformers(kit, tests.hf_model(case), reference.input_ids)
    args = of_tests("layouts").arguments("tp1", calculate_per_token_loss=True, **settings)
    model: Any = AutoModel.from_pretrained(reference.path, args, dtype="bfloat16")
    logits = model.logits(reference.input_ids).cpu()
    path = kit.scratch / f"{case}-gradients"
    gradients.export_gradient_of(model, reference, path)
    ours = read(path)
    limit = TIMES * relative(their_logits, reference.logits)
    kit.check(f"{case}: logits", relative(logits, reference.logits), limit)
    errors = {name: (relative(ours[name], x), relative(theirs[name], x)) for name, x in exact.items()}
    worst = max(errors, key=lambda name: errors[name][0] / errors[name][1])
    kit.check(f"{case}: gradients, {worst} worst", errors[worst][0], TIMES * errors[worst][1])


def _transformers(kit: Kit, model: Any, input_ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and logits of transformers in bf16, on the device."""
    half = copy.deepcopy(model).to(kit.device, torch.bfloat16)
    logits = half(input_ids.to(kit.device), use_cache=False).logits
    targets = input_ids[:, 1:].to(kit.device).flatten()
    torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets).backward()
    found = {name: parameter.grad.cpu() for name, parameter in half.named_parameters()}
    return found, logits.detach().cpu()


def saved_logits(kit: Kit, path: Path, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits of the model in a directory, computed by transformers on the device."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = loaded.to(kit.device).eval()(input_ids.to(kit.device), use_cache=False).logits
    return logits.float().cpu()
