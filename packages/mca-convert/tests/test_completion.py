"""The script of ``mca-convert completion``, as a shell runs it."""

import re
import subprocess
from pathlib import Path

import pytest

from mca_convert.cli import main


def test_bash_completes_commands_and_flags_with_and_without_a_command(tmp_path: Path, capsys) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    words = ["ver", "--merg", "verify a b --tol", "verify a b --merg", "--checkpoint_path a --push"]
    asked = "\n".join(
        f"COMP_WORDS=(mca-convert {some}); COMP_CWORD={len(some.split())}; _mca_convert; echo ${{COMPREPLY[@]}}"
        for some in words
    )
    done = subprocess.run(
        ["bash", "-c", f'source "$0"\n{asked}', tmp_path / "script"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:-1] == ["verify", "--merge", "--tolerance", "", "--push_to_hub"]


@pytest.mark.parametrize(("words", "message"), [
    (["completion", "csh"], "mca-convert completion: expected one of bash, zsh, fish, not 'csh'"),
    (["completion"], "missing SHELL; see mca-convert completion --help"),
    (["complete"], "unknown command 'complete'; did you mean 'completion'?"),
])  # fmt: skip
def test_what_no_script_exists_for(words: list[str], message: str, capsys) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("words", [[], ["plan"], ["inspect"], ["verify"], ["completion"]])
def test_help_has_one_line_for_each_option(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 120] == []
    options = re.split(r"\n(?=  --)", text)[1:]
    assert options or words == ["completion"]
    assert [text for text in options if len(re.findall(r"\n {8}(?=\S)", text)) != 1 or " ..." in text] == []
