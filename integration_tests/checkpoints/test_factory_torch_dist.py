"""Megatron's own checkpoints, written by the factory: complete, exact, in the background, for every layout and fork."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cases import Case, as_params, group_by_ranks, needed
from checkpoint_files import tensors_of
from harness import RanksFailed, run_ranks
from layouts import arguments, world_size
from mca_config.errors import McaError
from mca_convert.cli import main as convert
from mca_models.checkpoint_kinds import CheckpointKind, checkpoint_kind
from reference import make_reference

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
CASES = (
    Case("llama-tied", "tp2dp2", ("pp2vpp2",)),  # model, layout that saves, layout that loads
    Case("qwen2", "cp2", ("tp2pp2cp1",)),
    Case("qwen3-tied", "tp2pp2vpp2", ("tp1",)),
    Case("qwen3_moe", "tp2ep2etp1dp2", ("ep2",)),
    Case("deepseek_v3", "pp2ep2", ("tp2ep1sp",)),
    Case("qwen3_next", "tp2", ("pp2",)),
    Case("kimi_linear", "tp2", ("pp2",)),
    Case("bailing_hybrid", "tp2", ("pp2",)),
    Case("nemotron_h-dense", "tp2", ("pp2",)),
    Case("lfm2", "tp2", ("pp2",)),
    Case("jamba", "tp2", ("pp2",)),
    Case("minimax", "tp2", ("pp2",)),
    Case("gpt_oss", "ep2", ("tp2ep2etp1",)),
    Case("mixtral", "tp2etp2", ("ep2etp1",)),
    Case("olmoe", "dp2etp2", ("tp2etp1sp",)),
)
DEFAULT = (CASES[0], CASES[1], CASES[3])
"""Cases that other tests of the module need too."""
TESTED = pytest.mark.cases(0, always=[case.id for case in DEFAULT])


def _hf(family: str) -> str:
    """DeepSeek's expert bias is always fp32 where it is trained, and Kimi's and Ling's."""
    return (
        f"{family}-float32"
        if family in ("bailing_hybrid", "deepseek_v3", "kimi_linear")
        else f"{family}-bfloat16"
    )


def _saved(folder: Path, case: Case) -> Path:
    return folder / f"{case.model}-{case.layout}"


def save_all(cases: list[Case], hf: Path, folder: Path) -> None:
    """Saves each case. Runs on every rank."""
    from mca_models.megatron import AutoModel

    for case in cases:
        models = AutoModel.from_pretrained(hf / _hf(case.model), arguments(case.layout))
        assert models.save_pretrained(_saved(folder, case), ckpt_format="torch_dist") is None


def export_all(cases: list[Case], folder: Path) -> None:
    """Loads each on its other layout and exports it. Runs on every rank."""
    from mca_models.megatron import AutoModel

    for case in cases:
        models = AutoModel.from_pretrained(_saved(folder, case), arguments(*case.options))
        models.save_pretrained_as_hf(folder / f"{case.id}-hf")


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case that is needed, saved on one layout and exported from another."""
    folder = tmp_path_factory.mktemp("torch_dist")
    cases = list(dict.fromkeys([*DEFAULT, *needed(request)]))
    for case in cases:
        make_reference(case.model, folder / "hf", _hf(case.model).rpartition("-")[2])
    for size, group in group_by_ranks(cases).items():
        run_ranks(size, save_all, group, folder / "hf", folder)
    for size in (1, 2, 4):
        loaded = [case for case in cases if world_size(*case.options) == size]
        if loaded:
            run_ranks(size, export_all, loaded, folder)
    return folder


@TESTED
@pytest.mark.parametrize("case", as_params(CASES))
def test_another_layout_loads_every_bit(case: Case, saved: Path) -> None:
    assert tensors_of(saved / f"{case.id}-hf") == tensors_of(saved / "hf" / _hf(case.model))


@TESTED
@pytest.mark.parametrize("case", as_params(CASES))
def test_the_converter_exports_every_bit(case: Case, saved: Path, tmp_path: Path) -> None:
    checkpoint, source = _saved(saved, case), saved / "hf" / _hf(case.model)
    assert checkpoint_kind(checkpoint) is CheckpointKind.TORCH_DIST
    assert convert([f"--checkpoint_path={checkpoint}", f"--output_path={tmp_path / 'hf'}"]) == 0
    assert tensors_of(tmp_path / "hf") == tensors_of(source)
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            assert (checkpoint / name).read_bytes() == (source / name).read_bytes()


def test_every_replica_writes(saved: Path) -> None:
    files = (saved / "llama-tied-tp2dp2" / "iter_0000001").glob("*.distcp")
    sizes: dict[str, int] = {}
    for file in files:
        rank = file.name.split("_")[2]
        sizes[rank] = sizes.get(rank, 0) + file.stat().st_size
    assert set(sizes) == {"0", "1", "2", "3"}
    assert max(sizes.values()) < 2 * min(sizes.values())


def load_with_megatron(checkpoint: Path, layout: str) -> tuple[list[str], Any]:
    """Megatron's own ``load`` into a model of other weights: what is left different, and the common state."""
    from megatron.core import dist_checkpointing

    from mca_models.megatron import AutoModel
    from mca_models.megatron.state.torch_dist import model_state

    right = AutoModel.from_pretrained(checkpoint, arguments(layout))
    other = AutoModel.from_config(right.config, arguments(layout), seed=3)
    wanted = {key: value for key, value in model_state(other).items() if key.startswith("model")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts of torch that torch will replace
        state = dist_checkpointing.load(wanted, str(checkpoint / "iter_0000001"))
    for number, chunk in enumerate(other.chunks):
        chunk.load_state_dict(state["model" if len(other.chunks) == 1 else f"model{number}"], strict=False)
    pairs = zip(right.canonical_parameters(), other.canonical_parameters(), strict=True)
    different = [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]
    common = {key: state[key] for key in ("iteration", "checkpoint_version")}
    args = state["args"]  # Megatron asks them whether there is an optimizer
    without = args.no_save_optim and args.no_save_rng
    return different, common | {"tp": args.tensor_model_parallel_size, "weights alone": without}


@pytest.mark.parametrize(
    "case,layout", [(CASES[0], "pp2"), (CASES[3], "ep2")], ids=["llama-tied", "qwen3_moe"]
)
def test_megatron_reads_it(case: Case, layout: str, saved: Path) -> None:
    for different, common in run_ranks(2, load_with_megatron, _saved(saved, case), layout):
        assert different == []
        assert common == {"iteration": 1, "checkpoint_version": 3.0, "tp": 2, "weights alone": True}


def refusals(paths: list[Path]) -> list[str]:
    """Return the error of each checkpoint that is not loaded. Runs on every rank."""
    from mca_models.megatron import AutoModel

    messages = []
    for path in paths:
        with pytest.raises(McaError) as error:
            AutoModel.from_pretrained(path, arguments("tp2cp1"))
        messages.append(str(error.value))
    return messages


def test_every_missing_and_unexpected_name_is_reported(saved: Path, tmp_path: Path) -> None:
    formats = {"hf": saved / "hf" / "qwen2-bfloat16", "torch_dist": saved / "qwen2-cp2"}
    assert convert([f"--checkpoint_path={formats['hf']}", f"--output_path={tmp_path / 'mca'}"]) == 0
    formats["mca"] = tmp_path / "mca"
    paths = []
    for name, path in formats.items():
        for layers in (3, 5):  # it has 4
            wrong = tmp_path / f"{name}-{layers}"
            shutil.copytree(path, wrong)
            for file in ("config.json", "mca_config.json"):
                if (wrong / file).exists():
                    _set_layers(wrong / file, layers)
            paths.append(wrong)
    first, second = run_ranks(2, refusals, paths)
    assert first == second
    for path, message in zip(paths, first, strict=True):
        assert str(path) in message
        few, many = path.name.endswith("3"), path.name.endswith("5")
        whole = path.name.startswith("torch_dist")  # one tensor for all layers: both sides do not know it
        assert bool(re.search(r"\d+ missing", message)) == (many or whole), message
        assert bool(re.search(r"\d+ unexpected", message)) == (few or whole), message
        assert "layers" in message


def _set_layers(file: Path, layers: int) -> None:
    document = json.loads(file.read_text())
    for part in (document, document.get("model", {})):
        for name in ("num_hidden_layers", "num_layers", "layer_types"):
            if name in part:
                part[name] = ["full_attention"] * layers if name == "layer_types" else layers
    file.write_text(json.dumps(document))


def train_meanwhile(path: Path, folder: Path) -> dict[str, Any]:
    """Two saves in the background at once; nothing is written before the weights change. Runs on every rank."""
    from mca_models.megatron import AutoModel

    _write_once_there_is(folder / "go")
    models = AutoModel.from_pretrained(path, arguments("tp2"))
    first = models.save_pretrained(folder / "first", ckpt_format="torch_dist", async_save=True)
    for parameter in models.parameters():
        parameter.data.mul_(2)
    second = models.save_pretrained(folder / "second", ckpt_format="torch_dist", async_save=True)
    for parameter in models.parameters():
        parameter.data.fill_(7)
    assert first is not None
    assert second is not None
    seen = {"at once": first.done(), "there": (folder / "first").exists()}
    (folder / "go").touch()
    deadline = time.monotonic() + 60
    while not (first.done() and second.done()) and time.monotonic() < deadline:
        time.sleep(0.05)
    seen |= {"later": first.done() and second.done(), "still not there": not (folder / "first").exists()}
    second.finish()
    first.finish()
    first.finish()
    return seen


def forks_of_saves(path: Path, folder: Path) -> list[int]:
    """Return how many processes a save forks, of few bytes and of more than threads write. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.distributed import writer

    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(1))
    models = AutoModel.from_pretrained(path, arguments("tp2"))
    found = []
    for name, limit in (("few", writer.THREADS_UP_TO), ("many", 0)):
        forks.clear()
        with mock.patch.object(writer, "THREADS_UP_TO", limit):
            models.save_pretrained(folder / name, ckpt_format="torch_dist")
        found.append(len(forks))
    return found


def test_few_bytes_are_written_without_another_process(saved: Path, tmp_path: Path) -> None:
    from mca_models.megatron.platform import megatron_version

    source = saved / "hf" / "llama-tied-bfloat16"
    for few, many in run_ranks(2, forks_of_saves, source, tmp_path):
        assert few == 0
        assert (many > 0) == (megatron_version() < (0, 19)), "later ones have threads for any number"
    for name in ("few", "many"):
        assert convert([f"--checkpoint_path={tmp_path / name}", f"--output_path={tmp_path / name}-hf"]) == 0
        assert tensors_of(tmp_path / f"{name}-hf") == tensors_of(source)


def _write_once_there_is(file: Path) -> None:
    """Each tensor waits for ``file``, in this process and those that it forks."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    write = filesystem_async._write_item

    @functools.wraps(write)  # Megatron looks at its signature
    def later(*args: Any, **kwargs: Any) -> Any:
        while not file.exists():
            time.sleep(0.01)
        return write(*args, **kwargs)

    filesystem_async._write_item = later


def test_training_goes_on_while_it_saves(saved: Path, tmp_path: Path) -> None:
    source = saved / "hf" / "llama-tied-bfloat16"
    for seen in run_ranks(2, train_meanwhile, source, tmp_path):
        assert seen == {"at once": False, "there": False, "later": True, "still not there": True}
    for name in ("first", "second"):
        assert convert([f"--checkpoint_path={tmp_path / name}", f"--output_path={tmp_path / name}-hf"]) == 0
    assert tensors_of(tmp_path / "first-hf") == tensors_of(source)
    once, twice = (_floats(path) for path in (source, tmp_path / "second-hf"))
    assert all(torch.equal(2 * once[name], twice[name]) for name in once)


def _floats(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def die_while_saving(path: Path, folder: Path) -> None:
    from mca_models.megatron import AutoModel

    _write_once_there_is(folder / "never")
    models = AutoModel.from_pretrained(path, arguments("tp2"))
    pending: Any = models.save_pretrained(folder / "out", ckpt_format="torch_dist", async_save=True)
    rank = os.environ["RANK"]
    (folder / f"pid.{rank}").write_text(str(pending._writing._process.pid))
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_killed_while_it_saves(saved: Path, tmp_path: Path) -> None:
    source = saved / "hf" / "llama-tied-bfloat16"
    with pytest.raises(RanksFailed, match="died without a word"):
        run_ranks(2, die_while_saving, source, tmp_path)
    writers = [int(file.read_text()) for file in tmp_path.glob("pid.*")]
    deadline = time.monotonic() + 60
    while any(map(_runs, writers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(writers) == 2
    assert not any(map(_runs, writers)), "the writers end with their ranks"
    (left,) = tmp_path.glob("out*")
    assert left.name.startswith("out.partial-")
    assert (left / "new" / "iter_0000001").is_dir()
    assert not (left / "new" / "iter_0000001" / "metadata.json").exists()
    assert not (left / "new" / "iter_0000001" / ".metadata").exists()
    run_ranks(2, save_over, source, tmp_path / "out")
    assert checkpoint_kind(tmp_path / "out") is CheckpointKind.TORCH_DIST
    assert not list(tmp_path.glob("*.partial-*")), "the next save removes what was left"


def save_over(path: Path, target: Path) -> None:
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments("tp2"))
    models.save_pretrained(target, ckpt_format="torch_dist", overwrite=True)


OTHER = """
import sys
from pathlib import Path
from mca_config.arguments import DistributingParallelArguments
from mca_models.megatron import AutoModel, platform
mine, theirs = Path(sys.argv[1]), Path(sys.argv[2])
one = DistributingParallelArguments(pipeline_model_parallel_size=1)
models = AutoModel.from_pretrained(theirs / "torch_dist", one)
models.save_pretrained(mine / "torch_dist", ckpt_format="torch_dist")
AutoModel.from_pretrained(theirs / "mca", one).save_pretrained(mine / "mca")
print("megatron", platform.megatron_version())
"""


def _other_python() -> Path | None:
    """The interpreter of the other environment, with the other megatron-core."""
    here = Path(sys.prefix).resolve()
    found = [ROOT / name / "bin" / "python" for name in (".venv", ".venv-3.12")]
    return next((p for p in found if p.exists() and p.parent.parent.resolve() != here), None)


@pytest.mark.qualify
def test_two_versions_of_megatron_read_each_other(tmp_path: Path) -> None:
    python = _other_python()
    if python is None:
        pytest.skip("the other environment (.venv, .venv-3.12) is not there")
    source = make_reference("qwen3_next", tmp_path, "bfloat16").path
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    run_ranks(2, save_two, source, mine)
    command = [str(python), "-c", OTHER, str(theirs), str(mine)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**environment, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    for name in ("torch_dist", "mca"):
        run_ranks(1, export_one, theirs / name, tmp_path / f"{name}-hf")
        assert tensors_of(tmp_path / f"{name}-hf") == tensors_of(source)


def save_two(path: Path, folder: Path) -> None:
    """One model in both formats. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments("pp2"))
    models.save_pretrained(folder / "torch_dist", ckpt_format="torch_dist")
    models.save_pretrained(folder / "mca")


def export_one(path: Path, target: Path) -> None:
    from mca_models.megatron import AutoModel

    AutoModel.from_pretrained(path, arguments("tp1")).save_pretrained_as_hf(target)
