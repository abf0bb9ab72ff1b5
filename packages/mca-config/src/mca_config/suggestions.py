"""`suggestion` names a similar known word in the error about an unknown one."""

from collections.abc import Iterable

_EVALUATION = "eval"


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of an error about an unknown ``word``.

    If the word lacks one part of an option, an evaluation option is suggested only if no other option fits.

    Args:
        word: The unknown word.
        known: The known words; a flag is shown unchanged, any other word in quotes.
        otherwise: Text if no known word is similar.
    """
    from difflib import get_close_matches  # not needed for a command's help

    name, originals = word.lstrip("-"), {option.lstrip("-"): option for option in known}
    close = get_close_matches(name, originals, n=1, cutoff=0.6)
    if not close:
        return f"; {otherwise}"
    if _has_one_more_word(close[0], name, _EVALUATION):
        close = [option for option in originals if _has_one_more_word(option, name)]
        close.sort(key=lambda option: _EVALUATION in option)  # stable
    similar = originals[close[0]]
    return f"; did you mean {similar if similar.startswith('-') else repr(similar)}?"


def _has_one_more_word(name: str, shorter: str, more: str | None = None) -> bool:
    """Return whether ``name`` is ``shorter`` with one more word, which is ``more`` if that is set."""
    longer, words = (text.replace("-", "_").split("_") for text in (name, shorter))
    return any(
        words == longer[:i] + longer[i + 1 :] and more in (None, word) for i, word in enumerate(longer)
    )
