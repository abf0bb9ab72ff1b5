"""Packed rows compute what each sequence computes alone; adapters have the gradients of peft."""

from pathlib import Path

from tools.gpu_kit.kit import Kit, Layers, of_tests

CASES = ("qwen3", "mistral", "qwen2-yarn", "deepseek_v3")
ADAPTERS = ("qwen3", "qwen3_moe", "deepseek_v3")
EXACT = {"local": 1e-4, "engine": 1e-3}


def packing(kit: Kit, layers: Layers) -> None:
    """Logits and a gradient, packed and one after the other, and transformers'."""
    settings = kit.settings(layers)
    for case in CASES[:1] if kit.tiny else CASES:
        reference = of_tests("reference").make_reference(case, kit.scratch)
        found = of_tests("packed_rows").compare(reference, "tp1", **settings)
        for name, error in zip(("logits", "gradient", "transformers' logits"), found, strict=True):
            kit.check(f"{case}: {name}", error, EXACT[layers])


def lora(kit: Kit, layers: Layers) -> None:
    """Logits with an adapter, and the gradients of its tensors."""
    settings, tests = kit.settings(layers), of_tests("lora_gradients")
    for case in ADAPTERS[:1] if kit.tiny else ADAPTERS:
        expected = tests.expected_of(case, kit.scratch)
        job: tuple[Path, Path, str] = (expected.base, expected.adapter, "tp1")
        (found,) = tests.gradients([job], **settings)
        if isinstance(found, str):
            raise RuntimeError(found)
        logits, gradients = found
        kit.check(f"{case}: logits", float((logits.cpu() - expected.logits).abs().max()), EXACT[layers])
        kit.holds(f"{case}: adapter's names", gradients.keys() == expected.gradients.keys())
        errors = {
            name: float((gradients[name] - x).abs().max() / x.abs().max())
            for name, x in expected.gradients.items()
        }
        worst = max(errors, key=errors.__getitem__)
        kit.check(f"{case}: gradients, {worst} worst", errors[worst], EXACT[layers])
