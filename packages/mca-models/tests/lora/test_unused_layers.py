"""Adapters that PEFT puts on layers of a tower on which no feature depends."""

from pathlib import Path

import pytest
import tiny_vision
import torch

from mca_models.lora.peft_directory import open_peft, write_peft
from mca_models.templates import config_from_hf

peft = pytest.importorskip("peft")


def test_all_linears_of_llava_are_read_without_its_unused_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both adapters have one effect in transformers: no feature depends on the layer that is left out."""
    torch.manual_seed(0)
    model = tiny_vision.model_of("llava").eval()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "all")
    ids = torch.tensor([[1, *[65] * 4, 2]])
    pixels = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        wanted = adapted(input_ids=ids, pixel_values=pixels).logits
        base = adapted.unload()(input_ids=ids, pixel_values=pixels).logits
    assert (wanted - base).abs().max() > 1e-2
    read = open_peft(tmp_path / "all", config_from_hf(tiny_vision.described("llava")))
    assert "12 tensors adapt layers of the tower on which no feature of llava depends" in caplog.text
    assert "exclude_modules" in caplog.text
    write_peft(read, tmp_path / "kept")
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(tiny_vision.model_of("llava").eval(), tmp_path / "kept").eval()
    with torch.no_grad():
        found = again(input_ids=ids, pixel_values=pixels).logits
    assert torch.allclose(found, wanted, atol=1e-5)
