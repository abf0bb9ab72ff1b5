"""Parser of Megatron's pipeline layout strings, such as ``Et*3|(t*4|)*2m|L``.

``E`` embedding, ``t`` decoder layer, ``m`` MTP layer, ``L`` loss; ``|`` ends a stage,
``x*n`` repeats one letter or bar, ``(...)*n`` repeats a group of them; commas are ignored.
"""

import re

from mca_config.errors import McaError

LETTERS = "EtmL"
_LONGEST = 100_000
_ATOM = re.compile(r"([EtmL|])(?:\*(\d+))?")
_GROUP = re.compile(r"\(((?:[EtmL|](?:\*\d+)?)+)\)\*(\d+)")


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the letters of each stage, in pipeline order: all ranks of virtual stage 0, then of stage 1, ..."""
    compact = text.replace(",", "")
    position, flat = 0, ""
    while position < len(compact):
        group = _GROUP.match(compact, position)
        atom = group or _ATOM.match(compact, position)
        if atom is None or compact[atom.end() : atom.end() + 1] == "*":
            raise McaError(
                f"pipeline_model_parallel_layout {text!r:.200} cannot be read at {compact[position:]!r:.200}; expected "
                "E, t, m, L or | (each with *n at most once), or a group of them in one pair of parentheses "
                "with *n"
            )
        run, times = _unroll(group[1] if group else atom[0]), _count(group[2]) if group else 1
        if len(flat) + len(run) * times > _LONGEST:
            raise McaError(
                f"pipeline_model_parallel_layout {text!r:.200}: more than {_LONGEST} layers and stages"
            )
        flat += run * times
        position = atom.end()
    return tuple(flat.split("|"))


def _unroll(run: str) -> str:
    return "".join(letter * _count(count or "1") for letter, count in _ATOM.findall(run))


def _count(digits: str) -> int:
    """Return the number, or one above every limit if it has too many digits."""
    return int(digits) if len(digits) < 6 else _LONGEST + 1
