"""Reading needs no torch, and the package's exports are what it says."""

import subprocess
import sys
from pathlib import Path

import torch

import mca_models.foreign

_SCRIPT = """
import sys
for name in ("torch", "transformers", "safetensors", "megatron"):
    sys.modules[name] = None  # importing it fails
from pathlib import Path
from mca_models.foreign import open_torch_file
import mca_models.foreign.torch_dist, mca_models.foreign.roll, mca_models.foreign.quantised
(tensor,) = open_torch_file(Path(sys.argv[1])).state_dict().values()
print(tensor.read().tolist())
"""


def test_a_file_is_read_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3)}, tmp_path / "a.pt")
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, tmp_path / "a.pt"], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("[0, 1, 2]\n", "")


def test_exports_are_sorted_and_there() -> None:
    names = mca_models.foreign.__all__
    assert names == sorted(names)
    assert all(hasattr(mca_models.foreign, name) for name in names)
