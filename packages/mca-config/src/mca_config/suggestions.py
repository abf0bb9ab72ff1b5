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

    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    if not close:
        return f"; {otherwise}"
    return f"; did you mean {close[0] if close[0].startswith('-') else repr(close[0])}?"
