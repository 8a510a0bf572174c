"""Pages of HTML that need nothing beside themselves: no other host, no script, light and dark, wide and narrow.

Whatever is put into a page is escaped, unless it was made by `tag`: text of agents and environments cannot get out of
its place. Knows nothing of runs.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final


class Html(str):
    """Markup that is safe as it stands. Made by `tag` and `joined`."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element. Children that are not Html are escaped.

    Args:
        attributes: their names may end in an underscore (`class_`); others become hyphens. None: left out.
    """
    held = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{held}>") if name in _VOID else Html(f"<{name}{held}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Parts one after another; those that are not Html are escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Html:
    """A table that scrolls by itself where the page is too narrow.

    Args:
        words: leading columns that hold words; the others hold numbers and are set flush right.
    """

    def row(cell: str, values: Sequence[str]) -> Html:
        return tag("tr", *(tag(cell, v, class_=None if at < words else "number") for at, v in enumerate(values)))

    body = tag("tbody", *(row("td", values) for values in rows))
    return tag("div", tag("table", tag("thead", row("th", headings)), body), class_="scroll")


def page(title: str, *body: str) -> str:
    """A whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        # Should anything ever slip through the escaping, it still may not run or fetch.
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{_STYLE}</style>"),
    )
    document = Html(f'<html lang="en">{head}{tag("body", tag("h1", title), *body)}</html>')
    return f"<!DOCTYPE html>\n{document}\n"


def write_page(file: Path, content: str) -> Path:
    """Writes a page aside and renames it, so that a reader never meets half of one. Returns the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}")
    # A JSON file may name half of a pair of surrogates, which no encoding has.
    aside.write_text(content, encoding="utf-8", errors="replace")
    return aside.replace(file)


_VOID: Final = frozenset({"meta"})
"""Elements without an end tag. SVG's have one each, else what follows would lie in them."""

_STYLE: Final = """
:root{--ground:#fff;--raised:#f6f7f9;--ink:#1b1f24;--faint:#5c6570;--rule:#d5dae1;--alarm:#b3261e;
--s0:#0b62c4;--s1:#b85400;--s2:#00795c;--s3:#8a3fb0;--s4:#a3194f;--s5:#5f6b00;--s6:#00758f;--s7:#6b5847}
@media (prefers-color-scheme:dark){:root{--ground:#14171b;--raised:#1d2126;--ink:#e6e9ed;--faint:#9aa4af;--rule:#383f47;
--alarm:#ff8a80;--s0:#6fb1ff;--s1:#ffa658;--s2:#4fd0a5;--s3:#cf97ee;--s4:#ff8fb3;--s5:#c6d24a;--s6:#5ccfe6;--s7:#c9b09a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem;background:var(--ground);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.25rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:.25rem 0}
p{margin:.35rem 0}.faint{color:var(--faint);font-size:.875rem}.alarm{color:var(--alarm)}
.charts{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr))}
figure{margin:0;padding:.75rem;background:var(--raised);border-radius:.5rem}
figcaption{font-weight:600}svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--faint)}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .9rem;list-style:none;margin:.25rem 0 0;padding:0;font-size:.875rem}
.key{display:inline-block;width:1rem;height:.25rem;margin-right:.35rem;vertical-align:middle}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
th{font-weight:600}.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td svg{width:14rem}
details{background:var(--raised);border-radius:.5rem;padding:.6rem .75rem;margin:.5rem 0}
summary{cursor:pointer;font-weight:600}
.turn{border-top:1px solid var(--rule);margin-top:.6rem;padding-top:.4rem}
pre{margin:.15rem 0 .5rem;padding:.5rem;background:var(--ground);border-radius:.35rem;white-space:pre-wrap;
overflow-wrap:anywhere;font:13px/1.35 ui-monospace,monospace;unicode-bidi:plaintext}
"""
