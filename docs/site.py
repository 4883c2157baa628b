"""Hook of mkdocs: links that leave docs/ (examples, results, configurations) become plain code; the site lacks them."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!models|settings|input|decisions)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(lambda link: f"`{link[1].strip('`')}`", markdown)
