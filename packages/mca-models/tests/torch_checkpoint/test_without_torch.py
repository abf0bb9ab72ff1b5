"""Reading needs no torch."""

import subprocess
import sys
from pathlib import Path

import torch

_SCRIPT = """
import sys
for name in ("torch", "transformers", "safetensors", "megatron"):
    sys.modules[name] = None  # importing it fails
from pathlib import Path
from mca_models.torch_checkpoint.torch_file import open_torch_file
import mca_models.torch_checkpoint.torch_dist, mca_models.torch_checkpoint.roll, mca_models.quantization.hf_tensors
(tensor,) = open_torch_file(Path(sys.argv[1])).state_dict().values()
print(tensor.read().tolist())
"""


def test_a_file_is_read_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3)}, tmp_path / "a.pt")
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, tmp_path / "a.pt"], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("[0, 1, 2]\n", "")
