"""Pages of words: the home page, the walk, the glossary, and the Markdown files of `pages/`."""

import re
from pathlib import Path

from labkit.core import NOTEBOOK_FOLDER
from labkit.lab.notebooks import Notebook
from labkit.lab.site.addresses import Addresses

PAGES = Path(__file__).with_name("pages")
GLOSSARY = NOTEBOOK_FOLDER / "glossary.md"
LADDER = "11_ladder.png"
_TERM = re.compile(r"^\*\*(?P<term>[^*\n]+)\*\*: (?P<text>.+(?:\n(?!\s*$|\*\*).+)*)", re.MULTILINE)


def picture(name: str, alt: str) -> str:
    """Markdown with a picture, which scrolls within its own box where it would be too small to read."""
    return f"````{{container}} picture\n```{{image}} {name}\n:alt: {alt}\n```\n````"


def page_names() -> list[str]:
    """Names of the Markdown pages, without suffix, sorted."""
    return sorted(path.stem for path in PAGES.glob("*.md"))


def terms() -> dict[str, str]:
    """The glossary: term -> what it means, in Markdown, in the order of `notebooks/glossary.md`."""
    return {found["term"]: found["text"] for found in _TERM.finditer(GLOSSARY.read_text())} if GLOSSARY.exists() else {}


def glossary_page(addresses: Addresses) -> str:
    """A definition list; each term has an anchor."""
    entries = [
        f"{term}\n: {addresses.localized(' '.join(text.split()), 'notebooks')}" for term, text in terms().items()
    ]
    return "\n\n".join(["# Glossary", *entries]) + "\n"


def walk_page(notebooks: list[Notebook]) -> str:
    """The table of the notebooks, each with its question and a reader's minutes."""
    rows = "\n".join(
        f"| [{notebook.name.replace('_', ' ', 1)}]({notebook.name}.ipynb) | {notebook.question} | {notebook.minutes} |"
        for notebook in notebooks
    )
    names = "\n".join(notebook.name for notebook in notebooks)
    return _WALK.format(rows=rows, names=names)


def home_page() -> str:
    """The home page, and in its hidden table of contents the pages that the bar at the top names."""
    contents = ["notebooks/index", "pages/index", "plan", "api/index", "claims", "peers", "robustness", "glossary"]
    ladder = picture(LADDER, "Images per second, from a naive PIL loader to raw pixels, with the limits of the machine")
    return _HOME.format(ladder=ladder, contents="\n".join(contents))


def guide_page(pages: list[str]) -> str:
    """The table of contents of the Markdown pages."""
    links, names = "\n".join(f"- {{doc}}`{name}`" for name in pages), "\n".join(pages)
    return f"# Guide\n\n{links}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def plan_page(form: str) -> str:
    """The plan as a form, which a browser computes."""
    return f"{_PLAN}\n\n````{{raw}} html\n{form}\n````\n"


_WALK = """# Notebooks

Each notebook builds the technique by hand, asks for your prediction, checks that the variants give the same pixels,
measures, plots, explains, and says when the technique does not help. The pages show the stored run of each; yours will
differ.

| notebook | the question | minutes |
|---|---|---|
{rows}

```{{toctree}}
:hidden:

{names}
```
"""
_HOME = """# labkit

Your GPU is expensive, and it waits for a loader that decodes JPEGs. This lab shows, one measured step at a time, how
image data reaches a GPU in PyTorch: numbered notebooks to read and run, and a small library, `labkit`, to use in your
own training script.

{ladder}

The ladder that the notebooks climb: every rung loads the same photos, and all rungs were timed in one run.

## Begin

In a clone of the repository, in a fresh virtual environment:

```bash
python -m pip install -e ".[test]"
python -m labkit tour               # makes the photos, runs every notebook on your machine, writes a report
python -m labkit watch train.py     # what your own training script waits for, unchanged
```

- [Read the notebooks](notebooks/index.md), in order or by question.
- [Use it in your own training](pages/index.md): commands, comparing, storage, and what you can rely on.
- [Plan for N GPUs](plan.md): cores, storage and network, in a form.
- [Look up a name](api/index.rst) of `import labkit as lk`.
- [See which claims hold](claims.md), and [which loader others would pick](peers.md).
- [See how it was tested](robustness.md), and [what a word means](glossary.md).

```{{toctree}}
:hidden:

{contents}
```
"""
_PLAN = """# Plan

What many GPUs ask for, and what limits them. It is computed in your browser; nothing is sent anywhere."""
