"""`suggestion` ends an error about a word that is not known with the known word that was probably meant."""

from collections.abc import Iterable

_EVALUATION = "eval"


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about an unknown ``word``.

    Where one word is missing, an evaluation option is suggested only if no other option fits.

    Args:
        word: What was given.
        known: What could have been meant; a flag is shown as it is, any other word in quotes.
        otherwise: What to say when nothing known looks like it.
    """
    from difflib import get_close_matches  # a command's help does without it

    given, plain = word.lstrip("-"), {one.lstrip("-"): one for one in known}
    close = get_close_matches(given, plain, n=1, cutoff=0.6)
    if not close:
        return f"; {otherwise}"
    if _has_one_more_word(close[0], given, _EVALUATION):
        close = [name for name in plain if _has_one_more_word(name, given)]
        close.sort(key=lambda name: _EVALUATION in name)  # stable
    meant = plain[close[0]]
    return f"; did you mean {meant if meant.startswith('-') else repr(meant)}?"


def _has_one_more_word(name: str, given: str, more: str | None = None) -> bool:
    """Return whether ``name`` is ``given`` with one more word, which is ``more`` if that is set."""
    longer, words = (text.replace("-", "_").split("_") for text in (name, given))
    return any(
        words == longer[:i] + longer[i + 1 :] and more in (None, word) for i, word in enumerate(longer)
    )
