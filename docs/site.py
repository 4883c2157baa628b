"""Hook of mkdocs: links that leave docs/ (examples, results, configurations) become plain code; the site lacks them."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^):#]+)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def kept(link: re.Match[str]) -> str:
        leaves = posixpath.normpath(posixpath.join(folder, link[2])).startswith("..")
        return f"`{link[1].strip('`')}`" if leaves else link[0]

    return LINK.sub(kept, markdown)
