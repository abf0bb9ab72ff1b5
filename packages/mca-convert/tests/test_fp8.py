"""``--fp8``: blocks of 128 x 128 as a plain loop makes them, from every source, read back and compared."""

import json
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hf import save
from transformers import AutoModelForCausalLM

from mca_convert.cli import main
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.quantization.fp8 import BLOCK, TILE_BYTES, quantize, scale_shape
from mca_models.storage.safetensors import TensorInfo, read_header

SIZES = {"hidden_size": 160, "intermediate_size": 272}
E4M3 = ml_dtypes.float8_e4m3fn


def tensors_of(path: Path) -> dict[str, TensorInfo]:
    return {name: info for f in path.glob("*.safetensors") for name, info in read_header(f).tensors.items()}


def plain_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Block by block, as the definition says it."""
    wide = weight.astype(np.float32)
    values, scales = np.empty(wide.shape, E4M3), np.empty(scale_shape(wide.shape), np.float32)
    for lead in np.ndindex(wide.shape[:-2]):
        for i, j in np.ndindex(scales.shape[-2:]):
            cut = (*lead, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            largest = np.abs(wide[cut]).max()
            scales[(*lead, i, j)] = largest / np.float32(448) if largest else 1
            values[cut] = (wide[cut] / scales[(*lead, i, j)]).astype(E4M3)
    return values, scales


@pytest.mark.parametrize(
    "case,flags", [("qwen3-tied", ["--memory_limit=1M"]), ("deepseek_v3", ["--workers=2"])]
)
def test_every_source_gives_the_blocks_of_a_plain_loop(case: str, flags: list[str], tmp_path: Path) -> None:
    source = save(case, tmp_path / "hf", "bfloat16", **SIZES)
    read, mca = f"--checkpoint_path={source}", tmp_path / "mca"
    assert main([read, f"--output_path={mca}", "--tensor_model_parallel_size=2", "--quiet"]) == 0
    for number, given in enumerate((read, f"--checkpoint_path={mca}")):
        made = tmp_path / f"fp8-{number}"
        assert main([given, "--to=hf", "--fp8", f"--output_path={made}", "--quiet", *flags]) == 0
        _require_blocks(source, made)
        assert main(["verify", str(source), str(made), "--tolerance=0.06", "--quiet"]) == 0
        assert main(["verify", str(source), str(made), "--tolerance=0.0001", "--quiet"]) == 1
    quantisation = json.loads((made / "config.json").read_text())["quantization_config"]
    assert quantisation["weight_block_size"] == [128, 128]
    assert quantisation["fmt"] == "e4m3"
    assert ("lm_head" in quantisation["modules_to_not_convert"]) == (case == "deepseek_v3")


def _require_blocks(source: Path, made: Path) -> None:
    before, after = tensors_of(source), tensors_of(made)
    linears = {name for name in before if name + "_scale_inv" in after}
    assert after.keys() == before.keys() | {name + "_scale_inv" for name in linears}
    read_back = open_checkpoint(made)
    parts = {part.info.name: part for param in read_back.params for part in read_back.parts(param)}
    for name, info in before.items():
        weight = info.array()
        if name not in linears:
            assert len(info.shape) < 2 or name.endswith(
                ("embed_tokens.weight", "lm_head.weight", ".gate.weight")
            ), name
            assert after[name].array().tobytes() == weight.tobytes()
            continue
        values, scales = plain_blocks(weight)
        assert after[name].dtype == "F8_E4M3"
        assert after[name].array().tobytes() == values.tobytes(), name
        assert after[name + "_scale_inv"].array().tobytes() == scales.tobytes(), name
        rows, columns = weight.shape[-2:]
        whole = np.repeat(np.repeat(scales, 128, -2), 128, -1)[..., :rows, :columns] * values.astype(
            np.float32
        )
        assert np.array_equal(parts[name].info.array(), whole.astype(ml_dtypes.bfloat16)), name


def test_blocks_of_other_scales_are_copied_where_nothing_is_merged(tmp_path: Path) -> None:
    """Published scales need not be the largest magnitude over 448; quantised again, values would change."""
    source, fp8 = save("qwen3", tmp_path / "hf", "bfloat16", **SIZES), tmp_path / "fp8"
    assert main([f"--checkpoint_path={source}", "--to=hf", "--fp8", f"--output_path={fp8}", "--quiet"]) == 0
    stored = load_file(fp8 / "model.safetensors")
    for name, value in stored.items():
        if value.dtype == torch.float8_e4m3fn:
            stored[name] = value.float().clamp(-240, 240).to(value.dtype)
    save_file(stored, fp8 / "model.safetensors", {"format": "pt"})
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(source),
        peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]),
    )
    model.save_pretrained(tmp_path / "adapter")
    for number, more in enumerate(([], ["--merge", f"--adapter_path={tmp_path / 'adapter'}"])):
        made = tmp_path / f"made-{number}"
        options = ["--to=hf", "--fp8", f"--output_path={made}", "--quiet", *more]
        assert main([f"--checkpoint_path={fp8}", *options]) == 0
        before, after = tensors_of(fp8), tensors_of(made)
        same = {
            name: info.array().tobytes() == after[name].array().tobytes() for name, info in before.items()
        }
        assert before.keys() == after.keys()
        assert {name for name in same if not same[name]} == {
            name for name in same if more and "q_proj" in name
        }
    scale = next(name for name in stored if name.endswith("_scale_inv"))
    stored[scale] *= 1.00001
    save_file(stored, fp8 / "model.safetensors", {"format": "pt"})
    assert main(["verify", str(fp8), str(tmp_path / "made-0"), "--quiet"]) == 1


def test_transformers_loads_the_numbers_that_we_read(tmp_path: Path) -> None:
    """On a CPU it makes bf16 of them, of weights whose sizes are multiples of a block or below it."""
    import torch
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}
    source = save("deepseek_v3", tmp_path / "hf", "bfloat16", **sizes)
    made, plain = tmp_path / "fp8", tmp_path / "plain"
    assert main([f"--checkpoint_path={source}", "--to=hf", "--fp8", f"--output_path={made}", "--quiet"]) == 0
    assert main([f"--checkpoint_path={made}", "--to=hf", f"--output_path={plain}", "--quiet"]) == 0
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
        for path in (made, plain)
    )
    assert not any(theirs[1].values()), theirs[1]
    found = theirs[0].state_dict()
    for name, tensor in ours[0].state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_rounding_is_to_the_nearest_even() -> None:
    exact = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    exact = np.unique(exact[np.isfinite(exact)])
    between = (exact[1:] + exact[:-1]) / 2  # ties, and the numbers beside them
    tested = np.concatenate([exact, between, np.nextafter(between, 1e9), np.nextafter(between, -1e9)])
    tested = np.concatenate([tested, np.zeros(-len(tested) % 128)]).astype(np.float32)
    weight = np.zeros((len(tested) // 128 * 128, 128), np.float32)
    weight[: len(tested) // 128] = tested.reshape(-1, 128)
    weight[127::128, 0] = 448  # so each scale is 1
    values, scales = quantize("w", weight)
    assert (scales == 1).all()
    assert np.array_equal(values.view(np.uint8), weight.astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("exponent", [0, 36, 127, 141])
def test_every_number_of_bfloat16_is_divided_by_every_scale(exponent: int) -> None:
    """Blocks with each largest number of an exponent, and all numbers below it by up to 2**128."""
    largest = np.arange(exponent << 7, (exponent + 1) << 7)
    blocks_of = np.maximum(largest - np.arange(BLOCK * BLOCK)[:, None], 0).astype(np.uint16)
    blocks_of[1::2] |= 0x8000
    wide = np.zeros((BLOCK, 128 * BLOCK + 5), np.uint16)  # and some that are no whole block
    wide[:, :-5] = blocks_of.reshape(BLOCK, BLOCK, 128).swapaxes(1, 2).reshape(BLOCK, -1)
    weight = wide.view(ml_dtypes.bfloat16)
    values, scales = quantize("w", weight)
    tops = (np.append(largest, 0).astype(np.uint32) << 16).view(np.float32)
    smallest = np.finfo(np.float32).tiny  # a smaller scale would lose digits
    assert np.array_equal(scales[0], np.where(tops, np.maximum(tops / np.float32(448), smallest), 1))
    right = weight.astype(np.float32) / np.repeat(scales, BLOCK, 1)[:, : weight.shape[1]]
    assert np.array_equal(values.view(np.uint8), right.astype(E4M3).view(np.uint8))


def test_numbers_are_the_same_where_the_cpu_takes_small_ones_for_0() -> None:
    import torch

    bits = np.arange(124 << 7, 127 << 7, dtype=np.uint16)[:, None] - np.arange(
        0, 20 << 7, 20, dtype=np.uint16
    )
    weight = bits[:384, :128].view(ml_dtypes.bfloat16)  # below each largest number, all e4m3 numbers and 0
    right = plain_blocks(weight)
    found: list[np.ndarray] = []

    def flushing() -> None:  # in a thread of its own, as the mode is a thread's
        assert torch.set_flush_denormal(True)
        try:
            found.extend(quantize("w", weight))
        finally:
            torch.set_flush_denormal(False)

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    values, scales = found
    assert np.array_equal(scales, right[1])
    assert np.array_equal(values.view(np.uint8), right[0].view(np.uint8))


def test_zeros_and_values_that_are_not_finite(tmp_path: Path) -> None:
    values, scales = quantize("w", np.zeros((3, 130), np.float16))
    assert scales.tolist() == [[1, 1]] and not values.astype(np.float32).any()
    with pytest.raises(
        Exception, match=r"^tensor w has values that are not finite; it cannot be written as fp8$"
    ):
        quantize("w", np.full((2, 2), np.nan, ml_dtypes.bfloat16))


def test_megatron_targets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save("llama", tmp_path / "hf")
    assert main([f"--checkpoint_path={source}", f"--output_path={tmp_path / 'x'}", "--fp8"]) == 2
    assert "--fp8 is for Hugging Face targets; add --to hf, or remove it" in capsys.readouterr().err
    assert main(["plan", f"--checkpoint_path={source}", "--to=mca", "--fp8"]) == 2
    assert "--fp8 is for Hugging Face targets" in capsys.readouterr().err


def test_scales_stand_with_their_weights_in_small_files(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "hf", "bfloat16", **SIZES)
    mca, made = tmp_path / "mca", tmp_path / "fp8"
    assert main([f"--checkpoint_path={source}", f"--output_path={mca}", "--quiet"]) == 0
    flags = ["--to=hf", "--fp8", "--max_shard_size=20K", "--quiet"]
    assert main([f"--checkpoint_path={mca}", f"--output_path={made}", *flags]) == 0
    assert len(list(made.glob("*.safetensors"))) > 3
    _require_blocks(source, made)


def test_the_plan_counts_rows_of_blocks_that_stay_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128 rows of 8,192 are more than a buffer: they, their values, and what they are rounded in."""
    source = save("llama", tmp_path / "hf", "bfloat16", hidden_size=160, intermediate_size=8192)
    peaks = []
    for flags in ([], ["--fp8"]):
        read = [f"--checkpoint_path={source}", "--to=hf", "--workers=1", "--json"]
        assert main(["plan", *read, *flags]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert peaks[1] - peaks[0] == pytest.approx(128 * 8192 * 3 + TILE_BYTES - (1 << 20), rel=0.2)
