"""Builds the wheels and source distributions of a release, with the project's addresses in their metadata.

    uv run tools/release.py --repository https://HOST/OWNER/mca --out dist

Takes what is committed, not the working tree. Each file name's bytes follow from the commit and the address alone, so
that whoever builds them again gets the same. The address is an argument because a fork has another one; without one
nothing is built.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

from mca_config.printable import suggestion

ROOT = Path(__file__).resolve().parent.parent


def urls(repository: str, package: str) -> dict[str, str]:
    """Return `[project.urls]` of a package.

    Args:
        repository: Address of the repository's page, `https://HOST/OWNER/NAME`.
        package: Name of the package's directory below `packages`.
    """
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/packages/{package}/CHANGELOG.md",
        "Source": f"{repository}/tree/main/packages/{package}",
        "Issues": f"{repository}/issues",
    }


def write_urls(source: Path, repository: str) -> None:
    """Add the addresses to the `pyproject.toml` of each package of a copy of the repository."""
    for project in sorted(source.glob("packages/*/pyproject.toml")):
        lines = [f'{label} = "{url}"' for label, url in urls(repository, project.parent.name).items()]
        project.write_text(project.read_text() + "\n[project.urls]\n" + "\n".join(lines) + "\n")


def build(commit: str, repository: str, out: Path) -> list[Path]:
    """Build every package of `commit` into `out`, and returns the files.

    Raises:
        SystemExit: A file lacks an address.
    """
    date = _git("show", "--no-patch", "--format=%ct", commit)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        archive = source / "source.tar"
        _git("archive", "--output", str(archive), commit)
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        archive.unlink()
        write_urls(source, repository)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": date}
        subprocess.run(
            ["uv", "build", "--quiet", "--all-packages", "--out-dir", str(out)],
            cwd=source, env=environment, check=True,
        )  # fmt: skip
    files = sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])
    for file in files:
        check(file, repository)
    return files


def check(file: Path, repository: str) -> None:
    """Exits with a message if the metadata of a built file lacks one of the addresses."""
    if missing := set(urls(repository, _package(file)).values()) - addresses(file):
        sys.exit(f"{file}: its metadata lacks {', '.join(sorted(missing))}")


def addresses(file: Path) -> set[str]:
    """The addresses in the metadata of a wheel or a source distribution."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
            text = wheel.read(name).decode()
    else:
        with tarfile.open(file) as tar:
            (member,) = (each for each in tar.getmembers() if re.fullmatch(r"[^/]+/PKG-INFO", each.name))
            opened = tar.extractfile(member)
            assert opened is not None
            text = opened.read().decode()
    header = text.split("\n\n", 1)[0]
    return set(re.findall(r"^Project-URL: [^,]+, (\S+)$", header, re.MULTILINE))


def _package(file: Path) -> str:
    """The package that a file holds: mca_config-0.1.0.tar.gz is one of mca-config."""
    return file.name.split("-", 1)[0].replace("_", "-")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def _address(text: str) -> str:
    parts = urlsplit(text)
    if (
        parts.scheme != "https"
        or not parts.hostname
        or not parts.path.strip("/")
        or parts.query
        or parts.fragment
    ):
        raise argparse.ArgumentTypeError(f"expected https://HOST/OWNER/NAME, got {text!r}")
    return text.rstrip("/")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repository", type=_address, help="address of the repository's page; required")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="where the files go; new or empty (dist)"
    )
    parser.add_argument("--commit", default="HEAD", help="what is released (HEAD)")
    given, others = parser.parse_known_args(arguments)
    if others:
        flags = ("--repository", "--out", "--commit")
        parser.error(f"unknown argument {others[0]}{suggestion(others[0], flags, 'see --help')}")
    if given.repository is None:
        parser.error("--repository is required: https://HOST/OWNER/NAME")
    if given.out.exists() and any(given.out.iterdir()):
        parser.error(f"--out {given.out} is not empty; name a new directory")
    for file in build(given.commit, given.repository, given.out.resolve()):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
