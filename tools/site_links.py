"""A hook of MkDocs: what GitHub and the site show differently.

Links that lead out of `docs`, into the repository, become text, because the site has no such page. A bar in code in
a table needs a backslash on GitHub, which the site would show.
"""

import re
from typing import Any

_CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Return the page's text for the site; the words of a removed link are followed by its path.

    Args:
        markdown: Text of the file.
        page: MkDocs' page, whose folder links are relative to; None: a page directly in ``docs``.
    """
    depth = page.file.src_uri.count("/") if page else 0
    out = re.compile(rf"\[([^\]]+)\]\((?:\.\./){{{depth + 1}}}([^)]+)\)")
    lines = out.sub(_plain, markdown).split("\n")
    return "\n".join(_CODE.sub(_bars, line) if line.startswith("|") else line for line in lines)


def _bars(code: "re.Match[str]") -> str:
    return code[0].replace(r"\|", "|")


def _plain(link: "re.Match[str]") -> str:
    words, path = link[1], link[2]
    name = words.replace("`", "")
    if path in name:
        return words
    return f"`{path}`" if path.endswith(name) else f"{words} (`{path}`)"
