"""DCP directories under every form of Megatron's names, and every way in which they can be wrong.

What Megatron itself saves is read in ``integration_tests/checkpoints/test_torch_dist_reading.py``.
"""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import torch
from compare import assert_same
from torch_dist_files import State, by_layer, save

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts import gated_delta_net, mamba
from mca_models.torch_checkpoint.torch_dist import find_torch_dist, open_torch_dist
from mca_models.weights import Stage


def stacked(config: McaModelConfig, hf: dict[str, torch.Tensor]) -> State:
    """All layers in one tensor."""
    state = by_layer(config, hf)
    layers = [param for param in get_family(config.model_type).params(config) if param.stage is Stage.LAYER]
    for rule in {param.mca for param in layers if param.expert is None}:
        names = [rule.format(layer=layer) for layer in range(config.num_layers)]
        state[rule.replace("{layer}.", "")] = torch.stack([state.pop(name) for name in names])
    for number in (1, 2) if config.num_experts else ():
        tail = f"mlp.experts.experts.linear_fc{number}.weight"
        names = [f"decoder.layers.{layer}.{tail}" for layer in range(config.num_layers)]
        state[f"decoder.layers.{tail}"] = torch.stack([state.pop(name) for name in names])
    return state


def singleton(config: McaModelConfig, hf: dict[str, torch.Tensor]) -> State:
    """Experts apart, gate and up apart."""
    state: State = {}
    for name, tensor in by_layer(config, hf).items():
        parts = {name: tensor}
        if ".experts.experts." in name:
            head, _, tail = name.partition(".experts.experts.")
            parts = {
                f"{head}.experts.experts.{number}.{tail}": expert for number, expert in enumerate(tensor)
            }
        for key, part in parts.items():
            if key.endswith("linear_fc1.weight") and config.mlp.gated_linear_unit:
                state[f"{key}_w"], state[f"{key}_v"] = (half.clone() for half in part.chunk(2))
            else:
                state[key] = part.clone()
    return state


def local_norms(config: McaModelConfig, hf: dict[str, torch.Tensor]) -> State:
    """Return the names of norms in the local spec with experts."""
    return {
        name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): tensor
        for name, tensor in by_layer(config, hf).items()
    }


def delta_net_parts(config: McaModelConfig, hf: dict[str, torch.Tensor]) -> State:
    """The projections of gated delta net apart."""
    sizes = gated_delta_net.segments(config)
    names = ("query", "key", "value", "z", "beta", "alpha")
    state = by_layer(config, hf)
    for name in [name for name in state if name.endswith(("in_proj.weight", "conv1d.weight"))]:
        count = 6 if name.endswith("in_proj.weight") else 3
        for part, tensor in zip(names, state.pop(name).split(sizes[:count]), strict=False):
            state[f"{name}.{part}"] = tensor.clone()
    return state


def state_space_parts(config: McaModelConfig, hf: dict[str, torch.Tensor]) -> State:
    """The projections of state space layers apart."""
    sizes, state = mamba.segments(config), by_layer(config, hf)
    for name in [name for name in state if "in_proj.weight" in name or ".conv1d." in name]:
        parts = slice(1, 4) if ".conv1d." in name else slice(None)
        pieces = zip(("z", "x", "B", "C", "dt")[parts], state.pop(name).split(sizes[parts]), strict=True)
        state |= {f"{name}.{part}": piece.clone() for part, piece in pieces}
    return state


FORMS = [by_layer, stacked, singleton, local_norms]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "mixtral"])
def test_every_form_of_the_names_is_read(
    tmp_path: Path, checkpoint: Any, case: str, form: Callable[..., State]
) -> None:
    config, hf = checkpoint(case)
    source = open_torch_dist(save(tmp_path / "c", form(config, hf)), config)
    assert_same(source, hf)


@pytest.mark.parametrize(
    "case,form",
    [
        *(("qwen3_next", delta_net_parts), ("qwen3_5_text", delta_net_parts)),
        ("nemotron_h", state_space_parts),
    ],
)
def test_parts_of_fused_projections_are_joined(
    tmp_path: Path, checkpoint: Any, case: str, form: Callable[..., State]
) -> None:
    config, hf = checkpoint(case)
    source = open_torch_dist(save(tmp_path / "c", form(config, hf)), config)
    assert_same(source, hf)


@pytest.mark.cases(12)
@pytest.mark.parametrize("form", [by_layer, singleton])
@pytest.mark.parametrize("case", tiny_hf.ALL)
def test_every_family_is_read(tmp_path: Path, checkpoint: Any, case: str, form: Callable[..., State]) -> None:
    config, hf = checkpoint(case)
    assert_same(open_torch_dist(save(tmp_path / "c", form(config, hf)), config), hf)


@pytest.mark.parametrize("prefix", ["module.", "model.module."])
def test_prefixes_optimizer_states_and_objects_are_passed_over(
    tmp_path: Path, checkpoint: Any, prefix: str
) -> None:
    config, hf = checkpoint("llama")
    state: State = {prefix + name: tensor for name, tensor in by_layer(config, hf).items()}
    extra = {f"{prefix}decoder.layers.0.mlp.linear_fc1._extra_state": {"scale": 1}, "rng_state": [1, 2]}
    for kind in ("optimizer.state.exp_avg.", "chained_0.optimizer.state.fp32_param.", "chained_1."):
        extra |= {kind + name: tensor for name, tensor in state.items()}
    assert_same(open_torch_dist(save(tmp_path / "c", {**state, **extra}), config), hf)


def test_a_padded_vocabulary_is_cut(tmp_path: Path, checkpoint: Any) -> None:
    config, hf = checkpoint("llama")
    state = by_layer(config, hf)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[name] = torch.cat([state[name], torch.full((58, 32), 9.0, dtype=torch.bfloat16)])
    assert_same(open_torch_dist(save(tmp_path / "c", state), config), hf)


def test_a_stored_copy_of_a_tied_head_must_be_equal(tmp_path: Path, checkpoint: Any) -> None:
    config, hf = checkpoint("llama-tied")
    state = by_layer(config, hf)
    state["output_layer.weight"] = state["embedding.word_embeddings.weight"].clone()
    source = open_torch_dist(save(tmp_path / "equal", state), config)
    source.check_duplicates()
    assert_same(source, hf)
    state["output_layer.weight"][3, 3] += 1
    with pytest.raises(McaError, match=r"output_layer\.weight must repeat embedding"):
        open_torch_dist(save(tmp_path / "other", state), config).check_duplicates()


def test_the_dtype_is_that_of_the_weights(tmp_path: Path, checkpoint: Any) -> None:
    config, hf = checkpoint("llama")
    state = {name: tensor.half() for name, tensor in by_layer(config, hf).items()}
    source = open_torch_dist(save(tmp_path / "c", state), config)
    assert (config.dtype, source.config.dtype) == ("bfloat16", "float16")


def test_where_it_is_found(tmp_path: Path, checkpoint: Any) -> None:
    config, hf = checkpoint("llama")
    save(tmp_path / "iter_0000001/dist_model", by_layer(config, hf))
    assert find_torch_dist(tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1\n")
    assert find_torch_dist(tmp_path) == tmp_path / "iter_0000001/dist_model"
    config.save(tmp_path)
    assert_same(open_torch_dist(tmp_path), hf)
    assert_same(open_torch_dist(tmp_path / "iter_0000001"), hf)
    assert find_torch_dist(tmp_path / "iter_0000001/dist_model/nowhere") is None


@pytest.fixture
def directory(tmp_path: Path, checkpoint: Any) -> Path:
    config, hf = checkpoint("llama")
    path = save(tmp_path / "c", by_layer(config, hf))
    config.save(path)
    return path


def test_an_untouched_directory_is_good(directory: Path, checkpoint: Any) -> None:
    assert_same(open_torch_dist(directory), checkpoint("llama")[1])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_links_out_and_pipes_are_refused(name: str, directory: Path, tmp_path: Path) -> None:
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(McaError, match=f"{name}: leads out of the directory"):
        open_torch_dist(directory)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(McaError, match=f"{name}: not a file but a directory, pipe or device"):
        open_torch_dist(directory)


def edit(directory: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


NORM = "decoder.final_layernorm.weight"


def first(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == NORM)


def remove_storage(metadata: Any) -> None:
    metadata.storage_data = {i: s for i, s in metadata.storage_data.items() if i.fqn != NORM}


def move_offset(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata[NORM].chunks[0]
    chunk.sizes = torch.Size([16])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.state_dict_metadata.pop(NORM),
            r"1 missing tensor \(decoder.final_layernorm.weight\)",
        ),
        (remove_storage, r"chunk \[0\] of decoder.final_layernorm.weight is stored nowhere"),
        (lambda m: setattr(first(m), "relative_path", "../evil.distcp"), "outside of the directory"),
        (lambda m: setattr(first(m), "relative_path", "/etc/passwd"), "outside of the directory"),
        (lambda m: setattr(first(m), "relative_path", "none.distcp"), "none.distcp: cannot be read"),
        (lambda m: setattr(first(m), "offset", 1 << 40), "the file ends at"),
        (lambda m: setattr(first(m), "length", 200), "not a file of torch.save"),
        (lambda m: setattr(first(m), "offset", -5), "is expected|are expected"),
        (lambda m: setattr(first(m), "transform_descriptors", ["zstd"]), "compressed or encrypted"),
        (move_offset, r"is BF16 \[32\], .metadata says BF16 \[16\]"),
        (lambda m: setattr(m.state_dict_metadata[NORM], "size", torch.Size([64])), "leave a hole"),
        (lambda m: setattr(m.state_dict_metadata[NORM].properties, "dtype", torch.float32), "says F32"),
        (lambda m: setattr(m, "storage_data", None), "a Metadata without storage_data"),
        (lambda m: setattr(m.state_dict_metadata[NORM], "size", 7), "without size"),
        (lambda m: m.state_dict_metadata.clear(), "0 tensors are named embedding"),
    ],
)
def test_a_directory_that_lies_is_refused(
    directory: Path, change: Callable[[Any], object], message: str
) -> None:
    edit(directory, change)
    with pytest.raises(McaError, match=message):
        open_torch_dist(directory)


def test_unexpected_tensors_and_other_shapes_are_refused(tmp_path: Path, checkpoint: Any) -> None:
    config, hf = checkpoint("llama")
    state = by_layer(config, hf)
    with pytest.raises(McaError, match=r"1 unexpected tensor \(decoder.layers.9.x\)"):
        open_torch_dist(save(tmp_path / "a", {**state, "decoder.layers.9.x": torch.ones(1)}), config)
    with pytest.raises(
        McaError, match=r"final_layernorm.weight has shape \[5\]; the configuration says \[32\]"
    ):
        open_torch_dist(save(tmp_path / "b", {**state, NORM: torch.ones(5)}), config)


def test_a_truncated_file_is_refused(directory: Path) -> None:
    (file,) = directory.glob("*.distcp")
    nbytes = file.stat().st_size
    for size in (nbytes - 1, nbytes // 2, 0):
        os.truncate(file, size)
        with pytest.raises(McaError, match=r"distcp"):
            open_torch_dist(directory)


def test_metadata_that_is_no_metadata_is_refused(directory: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(McaError, match="a dict instead of checkpoint metadata"):
        open_torch_dist(directory)
    (directory / ".metadata").write_bytes(b"garbage")
    with pytest.raises(McaError, match="not a pickle"):
        open_torch_dist(directory)
    (directory / ".metadata").unlink()
    with pytest.raises(McaError, match=r"no \.metadata is there"):
        open_torch_dist(directory)


def test_hostile_metadata_runs_nothing(directory: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch '{tmp_path}/ran'",)

    edit(directory, lambda metadata: setattr(metadata, "planner_data", Evil()))
    with pytest.raises(McaError, match=r"\.metadata: the pickle names posix\.system"):
        open_torch_dist(directory)
    assert not (tmp_path / "ran").exists()


def test_other_backends_are_refused_by_name(directory: Path) -> None:
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(McaError, match=r"format is 'zarr'; expected 'torch_dist'"):
        open_torch_dist(directory)


def test_no_configuration_is_one_clear_error(directory: Path) -> None:
    (directory / "mca_config.json").unlink()
    with pytest.raises(McaError, match=r"put the model's Hugging Face config\.json next to it"):
        open_torch_dist(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(McaError, match=r"config\.json: cannot be read"):
        open_torch_dist(directory)
