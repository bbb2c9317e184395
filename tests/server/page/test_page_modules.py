"""The page's modules that need no browser, under node; Markdown beside markdown-it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from penstock.server import page

HERE = Path(__file__).parent
MARKDOWN = [
    "plain",
    "two\nlines",
    "two  \nlines\\\nbroken",
    "# One\n## Two ##\n### Three *em* #\n####### seven",
    "#hashtag\n\n#",
    "a *b* _c_ **d** __e__ ***f*** ~~g~~",
    "*a **b** c* **a *b* c** ***a* b** ***a** b*",
    "**a*b**c* 2*3*4 snake_case_name __init__ _a_b_ *a _b* c_",
    "a * b * c ** d ** e",
    "*(a)* **(b)**c **a.**b 'em*a*'",
    "****a**** *****b***** **a **b** c**",
    "`a` ``b ` c`` ` d ` `` ` `` `e\nf` `unclosed",
    "*a `*` b* **`c`** [`d`](https://e.example/)",
    r"\*a\* \`b\` \[c\] \\ \d 1\. x",
    "[a](https://b.example/c?d=1) [e f](<https://g.example/>) [h](https://i.example/j_(k))",
    "[*b* `c`](https://c.example/)",
    "[a] [c](d e) ![e]",
    "<https://a.example/b> <mailto:a@b.example> <not a link>",
    "- a\n- b\n- c",
    "* a\n+ b\n- c",
    "- a\n  - b\n    - c\n  - d\n- e",
    "1. a\n2. b\n\n   more\n3. c",
    "7) a\n8) b",
    "- a\n\n- b",
    "- a\n\n  b\n- c",
    "- a\nlazy\n- b",
    "- # h\n- > q\n- ```\n  x\n  ```",
    "1. a\n   ```py\n   x = 1\n   ```\n2. b",
    "text\n- list\n\ntext\n1. one\n\ntext\n2. not a list",
    "-\n- a\n-",
    "> a\n> b\nlazy\n\nc",
    "> # h\n>\n> - a\n> - b\n> > deep",
    "```\na\n  b\n\nc\n```\nafter",
    "```python title\nx\n```",
    "~~~\n```\n~~~",
    "````\n```\n````",
    "```\nunclosed\n*a*",
    "  ```\n  a\n b\n  ```",
    "``` a`b\ntext",
    "---\n\n***\n\n_ _ _\n\n- - -",
    "a\n***\nb",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "| a | b | c |\n|:--|:-:|--:|\n| *1* | `2` |\n| 3 | 4 | 5 | 6 |",
    "a | b\n--|--\n1 | 2\n\nafter",
    "| a \\| b | c |\n|---|---|\n| `x \\| y` | z |",
    "| a | b |\n|---|\n| not | a table |",
    "text\n\n| a |\n|---|\n> quote",
    "<b>html</b> & \"quotes\" 'single'",
    "tab\tinside\n\n-\ta\n-\tb",
    "😀 **é** *日本語*",
    "a\r\nb\r\n\r\n- c\r\n- d",
]
node = shutil.which("node")
needs_node = pytest.mark.skipif(node is None, reason="node isn't installed")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's modules beside the tests of them, as node wants them."""
    folder = tmp_path_factory.mktemp("page")
    for source in [*Path(page.__file__).parent.glob("*.js"), *HERE.glob("*.mjs")]:
        shutil.copy(source, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


@needs_node
def test_modules(modules: Path) -> None:
    ran = subprocess.run(
        [str(node), "--test", "page.test.mjs"], cwd=modules, capture_output=True, check=False,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^# pass [1-9]", ran.stdout, re.MULTILINE), ran.stdout


def squeezed(html: str) -> str:
    """Without what a browser doesn't show: space between blocks and around line breaks."""
    block = r"/?(?:p|h\d|ul|ol|li|blockquote|pre|hr|table|thead|tbody|tr|th|td)\b[^>]*"
    html = html.replace("<br />", "<br>").replace("<hr />", "<hr>")
    html = re.sub(r"\s*(<br>)?\s*\n\s*(?![^<]*</code>)", r"\1\n", html)
    html = re.sub(r"\n*</code></pre>", "</code></pre>", html)
    return re.sub(rf"\s*(<{block}>)\s*", r"\1", html).strip()


@needs_node
def test_markdown_is_read_as_markdown_it_reads_it(modules: Path) -> None:
    # HTML, references, entities, underlined headings and indented code are text on the page.
    without = ["html_block", "html_inline", "reference", "entity", "lheading", "code"]
    oracle = MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable(without)
    ran = subprocess.run(
        [str(node), "html.mjs"], cwd=modules, input=json.dumps(MARKDOWN), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    read = dict(zip(MARKDOWN, map(squeezed, json.loads(ran.stdout)), strict=True))
    expected = {
        text: squeezed(re.sub(r"<s>(.*?)</s>", r"<del>\1</del>", oracle.render(text)))
        for text in MARKDOWN
    }
    assert read == expected
