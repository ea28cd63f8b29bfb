"""For mkdocs: files of the repository that a page links to, outside of docs/, become part of the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that is linked to; one that is not there stays a broken link, and fails a strict build."""
    for page in files.documentation_pages():
        for name in OUTSIDE.findall(page.content_string):
            if (ROOT / name).is_file() and files.get_file_from_path(f"files/{name}") is None:
                files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the files that were added."""

    def lead(link: re.Match[str]) -> str:
        added = files.get_file_from_path(f"files/{link[1]}") is not None
        return f"](files/{link[1]})" if added else link[0]

    return OUTSIDE.sub(lead, markdown)
