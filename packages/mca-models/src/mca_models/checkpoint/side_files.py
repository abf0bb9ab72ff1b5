"""The small files of a checkpoint directory that go along with the weights both ways."""

from pathlib import Path

from mca_config.errors import McaError
from mca_models.checkpoint.atomic import write_file
from mca_models.checkpoint.hf_directory import inside

_WRITTEN = {"config.json", "mca_config.json", "latest_checkpointed_iteration.txt"}
_MEGATRON = {"metadata.json", "latest_wandb_artifact_path.txt", "progress.txt"}  # of the source's own kind
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".npz", ".gguf", ".h5", ".msgpack", ".onnx"),
    ".index.json",
)
_LARGEST = 64 << 20  # a tokenizer's files stay far below


def side_files(source: Path) -> list[Path]:
    """Tokenizer, generation config, chat template, remote code, licence: all but weights and configs.

    Raises:
        McaError: A link leads out of the directory.
    """
    return sorted(
        inside(source, file.name)
        for file in source.iterdir()
        if file.is_file()
        and file.name not in _WRITTEN | _MEGATRON
        and not file.name.startswith(".")
        and not file.name.endswith(_WEIGHTS)
        and file.stat().st_size <= _LARGEST
    )


def copy_side_files(source: Path, target: Path) -> dict[str, int]:
    """Copies and syncs them; returns their sizes by name."""
    return {file.name: _copy(file, target / file.name) for file in side_files(source)}


def _copy(file: Path, target: Path) -> int:
    """Copies a file with its permissions, as far as the umask leaves them."""
    try:
        data, mode = file.read_bytes(), file.stat().st_mode
    except OSError as error:
        raise McaError(f"{file}: cannot be read ({error.strerror})") from None
    return write_file(target, data, mode & 0o777 | 0o600)
