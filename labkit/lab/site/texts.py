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


def home_page(has_plan: bool, pages: list[str]) -> str:
    """The home page, and in its hidden table of contents every other page."""
    plan = ["plan"] if has_plan else []
    contents = ["notebooks/index", *plan, "api/index", "claims", "peers", "robustness", "glossary"]
    links = "\n".join([_PLAN_LINK] * has_plan + [f"- {{doc}}`pages/{name}`" for name in pages])
    return _HOME.format(ladder=LADDER, links=links, contents="\n".join(contents + [f"pages/{name}" for name in pages]))


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

```{{image}} {ladder}
:alt: Images per second, from a naive PIL loader to raw pixels, with the limits of the machine
```

The ladder that the notebooks climb: every rung loads the same photos, and all rungs were timed in one run.

## Begin

In a clone of the repository, in a fresh virtual environment:

```bash
python -m pip install -e ".[test]"
python -m labkit tour               # makes the photos, runs every notebook on your machine, writes a report
python -m labkit watch train.py     # what your own training script waits for, unchanged
```

- [Read the notebooks](notebooks/index.md), in order or by question.
- [Look up a name](api/index.rst) of `import labkit as lk`.
- [See which claims hold](claims.md), and [which loader others would pick](peers.md).
- [See how it was tested](robustness.md), and [what a word means](glossary.md).
{links}

```{{toctree}}
:hidden:

{contents}
```
"""
_PLAN_LINK = "- [Plan for N GPUs](plan.md): cores, storage and network, in a form."
_PLAN = """# Plan

What many GPUs ask for, and what limits them. It is computed in your browser; nothing is sent anywhere."""
