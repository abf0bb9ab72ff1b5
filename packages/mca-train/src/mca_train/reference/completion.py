"""`completion` writes the script by which a shell completes the words of ``mca-train``."""

from collections.abc import Iterable, Mapping
from dataclasses import fields

from mca_config.errors import UsageError
from mca_train.plan.options import PlanOptions
from mca_train.reference.keys import keys_of
from mca_train.tasks.task import Task

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_mca_train() {
    local word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    elif [[ $word == --* ]]; then
        case ${COMP_WORDS[1]} in
@CASES@
        esac
    fi
}
complete -o default -F _mca_train mca-train
"""


def completion(shell: str, commands: Iterable[str], tasks: Mapping[str, Task]) -> str:
    """The script, to be kept in a file: making it imports Hugging Face's arguments, which takes seconds.

    Args:
        shell: Its name.
        commands: The words after ``mca-train``.
        tasks: The kinds of run, whose keys are flags.

    Raises:
        UsageError: There is no script for that shell.
    """
    if shell not in SHELLS:
        raise UsageError(f"mca-train completion knows {', '.join(SHELLS)}, not {shell!r}")
    flags = {name: [f"--{key.name}" for key in keys_of(task)] for name, task in tasks.items()}
    if shell == "fish":
        return _fish(commands, flags)
    plans = {f"--{field.name}" for field in fields(PlanOptions)}
    flags["plan"] = sorted({flag for some in flags.values() for flag in some} | plans)
    cases = "\n".join(
        f'            {name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;'
        for name, words in flags.items()
    )
    script = _BASH.replace("@COMMANDS@", " ".join(commands)).replace("@CASES@", cases)
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script


def _fish(commands: Iterable[str], flags: Mapping[str, Iterable[str]]) -> str:
    lines = [f"complete -c mca-train -n __fish_use_subcommand -a '{' '.join(commands)}'"]
    for name, words in flags.items():
        seen = f"__fish_seen_subcommand_from {name}"
        lines += [f"complete -c mca-train -n '{seen}' -l {word[2:]} -r" for word in words]
    return "\n".join(lines) + "\n"
