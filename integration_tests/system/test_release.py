"""Files of a release: those of every package, with addresses, the same on every machine."""

import hashlib
from pathlib import Path

import pytest
from tools import release

ADDRESS = "https://example.org/us/mca"


def _digests(files: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.qualify
def test_every_file_of_a_release_names_the_project_s_addresses(tmp_path: Path) -> None:
    files = release.build("HEAD", ADDRESS, tmp_path)
    packages = {"mca_config", "mca_models", "mca_train", "mca_convert"}
    assert {file.name.split("-", 1)[0] for file in files} == packages
    assert len(files) == 2 * len(packages)
    for file in files:
        assert f"{ADDRESS}/issues" in release.addresses(file)
    with pytest.raises(SystemExit, match=r"its metadata lacks https://example\.org/them/mca"):
        release.check(files[0], "https://example.org/them/mca")


@pytest.mark.qualify
def test_a_release_is_the_same_bytes_again(tmp_path: Path) -> None:
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    built = _digests(release.build("HEAD", ADDRESS, first))
    assert built == _digests(release.build("HEAD", ADDRESS, second))
    assert not set(built.items()) & set(
        _digests(release.build("HEAD", "https://example.org/them/mca", other)).items()
    )


@pytest.mark.parametrize(
    "address", ["", "mca", "http://example.org/us/mca", "https://example.org", "https:///us/mca"]
)
def test_an_address_that_is_none_is_refused(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        release.main(["--repository", address, "--out", str(tmp_path / "dist")])
    assert caught.value.code == 2
    assert "expected https://HOST/OWNER/NAME" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--repositry", ADDRESS], "unknown argument --repositry; did you mean --repository?"),
        (["--commit", "HEAD"], "--repository is required: https://HOST/OWNER/NAME"),
    ],
)
def test_a_misspelt_flag_is_told_before_what_is_missing(
    words: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        release.main(words)
    assert caught.value.code == 2
    assert f"error: {reported}\n" in capsys.readouterr().err
