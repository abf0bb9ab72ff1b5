"""A hook of MkDocs: links that lead out of `docs`, into the repository, become text, as the site has no such page."""

import re
from typing import Any

_OUT = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text; a link's words are followed by the path that they led to.

    Args:
        markdown: As it is written.
    """
    return _OUT.sub(_plain, markdown)


def _plain(link: "re.Match[str]") -> str:
    words, path = link[1], link[2]
    return words if path in words.replace("`", "") else f"{words} (`{path}`)"
