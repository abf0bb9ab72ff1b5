"""`suggestion` ends an error about a word that is not known with the known word that was probably meant."""

from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about an unknown ``word``.

    Args:
        word: What was given.
        known: What could have been meant; a flag is shown as it is, any other word in quotes.
        otherwise: What to say when nothing known looks like it.
    """
    from difflib import get_close_matches  # a command's help does without it

    plain = {one.lstrip("-"): one for one in known}
    close = get_close_matches(word.lstrip("-"), plain, n=1, cutoff=0.6)
    if not close:
        return f"; {otherwise}"
    meant = plain[close[0]]
    return f"; did you mean {meant if meant.startswith('-') else repr(meant)}?"
