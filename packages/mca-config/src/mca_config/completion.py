"""Shell completion scripts for the commands of mca."""

from collections.abc import Mapping, Sequence

from mca_config.errors import UsageError

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
@FUNCTION@() {
    local word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    if [[ $word == --* ]]; then
        case ${COMP_WORDS[1]} in
@CASES@
        esac
    elif [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    fi
}
complete -o default -F @FUNCTION@ @PROGRAM@
"""


def completion(program: str, shell: str, flags: Mapping[str, Sequence[str]], default: str = "") -> str:
    """Return the completion script.

    Args:
        program: Name of the program.
        shell: One of `SHELLS`.
        flags: Flags of each command, by name of the command.
        default: The command whose flags may follow ``program`` directly.

    Raises:
        UsageError: The shell is not supported.
    """
    if shell not in SHELLS:
        raise UsageError(f"{program} completion: expected one of {', '.join(SHELLS)}, not {shell!r}")
    if shell == "fish":
        return _fish(program, flags, default)
    cases = "\n".join(
        f'            {"*" if name == default else name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;'
        for name, words in sorted(flags.items(), key=lambda item: item[0] == default)
        if words
    )
    script = _BASH.replace("@COMMANDS@", " ".join(flags)).replace("@CASES@", cases)
    script = script.replace("@FUNCTION@", f"_{program.replace('-', '_')}").replace("@PROGRAM@", program)
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script


def _fish(program: str, flags: Mapping[str, Sequence[str]], default: str) -> str:
    lines = [f"complete -c {program} -n __fish_use_subcommand -a '{' '.join(flags)}'"]
    others = " ".join(name for name in flags if name != default)
    for name, words in flags.items():
        seen = (
            f"__fish_seen_subcommand_from {name}"
            if name != default
            else f"not __fish_seen_subcommand_from {others}"
        )
        lines += [f"complete -c {program} -n '{seen}' -l {word[2:]} -r" for word in words]
    return "\n".join(lines) + "\n"
