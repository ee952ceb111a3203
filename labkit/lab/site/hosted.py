"""How a notebook's page says to run it on a hosted GPU: from the project's address, or, without one, from a wheel."""

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata

from labkit.core import DISTRIBUTION

_GITHUB = re.compile(r"https://github\.com/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)")
_BOX = """<details class="hosted-gpu">
<summary>Run this notebook on a hosted GPU</summary>

{text}

</details>"""
_COLAB = """[Open {name} in Colab]({colab}), choose a runtime with a GPU, and run this in a new first cell:

```bash
!pip install "{distribution}[fast] @ git+{repository}"
```

Restart the session if pip asks for it, and run the notebook from the top. Set `LABKIT_SCALE` to `gpu` for larger
experiments: `%env LABKIT_SCALE=gpu` in the same cell."""
_UPLOAD = """labkit has no public address yet, so take it along as a wheel:

1. In a clone, build it: `python -m pip wheel --no-deps .` writes `{wheel}`.
2. <a href="../files/{name}.ipynb" download>Download this notebook</a>, and open it in a hosted service with a GPU,
   such as [Colab](https://colab.research.google.com/) (*File*, *Upload notebook*) or
   [Kaggle](https://www.kaggle.com/code).
3. Upload the wheel to the session's files, and run this in a new first cell:

```bash
!pip install {wheel}
```

Restart the session if pip asks for it, and run the notebook from the top. Without opening it,
`!python -m labkit tour --only {number} --scale gpu` runs it there, on a copy in
`labkit-notebooks/`, and writes a report."""


def repository() -> str | None:
    """The address that `[project.urls] Repository` gives in the installed package's metadata, or None."""
    with suppress(PackageNotFoundError):
        for entry in metadata(DISTRIBUTION).get_all("Project-URL") or ():
            label, _, address = entry.partition(",")
            if label.strip().lower() == "repository":
                return address.strip().rstrip("/").removesuffix(".git")
    return None


def hosted_note(name: str, address: str | None) -> str:
    """Markdown for the page of notebook `name`: a box that says how to run it on a hosted GPU.

    Args:
        name: Such as `02_read_image`.
        address: From `repository`. Colab opens only GitHub's; with another, or none, the note says how to upload.
    """
    if found := _GITHUB.fullmatch(address or ""):
        place = f"github/{found['owner']}/{found['name']}/blob/main/notebooks/{name}.ipynb"
        colab = f"https://colab.research.google.com/{place}"
        text = _COLAB.format(name=name, colab=colab, distribution=DISTRIBUTION, repository=address)
    else:
        wheel = f"{DISTRIBUTION.replace('-', '_')}-*.whl"
        text = _UPLOAD.format(name=name, wheel=wheel, number=name.partition("_")[0])
    return _BOX.format(text=text)
