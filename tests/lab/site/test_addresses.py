"""Links of the repository's texts on pages of the site."""

import pytest

from labkit.lab.site.addresses import Addresses

HERE = Addresses(frozenset({"02_read_image"}), frozenset({"guide"}))
PUBLIC = Addresses(frozenset({"02_read_image"}), frozenset({"guide"}), "https://github.com/x/y")


@pytest.mark.parametrize(
    ("link", "folder", "becomes"),
    [
        ("[02](02_read_image.ipynb)", "notebooks", "[02](/notebooks/02_read_image.ipynb)"),
        ("[02](02_read_image.ipynb#Look)", "notebooks", "[02](/notebooks/02_read_image.ipynb)"),
        ("[02](notebooks/02_read_image.ipynb)", "", "[02](/notebooks/02_read_image.ipynb)"),
        ("[02](../../../../notebooks/02_read_image.ipynb)", "labkit/lab/site/pages",
         "[02](/notebooks/02_read_image.ipynb)"),
        ("[03](03_persistent_workers.ipynb)", "notebooks", "03"),
        ("[words](../notebooks/glossary.md)", "notebooks", "[words](/glossary.md)"),
        ("[02](../notebooks/02_read_image.ipynb)", "pages", "[02](/notebooks/02_read_image.ipynb)"),
        ("[guide](guide.md)", "pages", "[guide](/pages/guide.md)"),
        ("[how](../.github/CONTRIBUTING.md)", "notebooks", "how"),
        ("[guide](guide.md#watch)", "labkit/lab/site/pages", "[guide](/pages/guide.md#watch)"),
        ("[guide](labkit/lab/site/pages/guide.md)", "", "[guide](/pages/guide.md)"),
        ("[runs](tests/hardening/records/README.md#faults)", "", "[runs](/robustness.md#faults)"),
        ("[home](../README.md)", "notebooks", "[home](/index.md)"),
        ("[MIT](LICENSE)", "", "MIT"),
        ("[`code [x]`](labkit/core/rng.py)", "", "`code [x]`"),
        ("[a page](/notebooks/03.ipynb)", "", "[a page](/notebooks/03.ipynb)"),
        ("[there](https://a.b/c), [below](#d)", "", "[there](https://a.b/c), [below](#d)"),
        ("![a plot](x.png)", "notebooks", "![a plot](x.png)"),
        ("\n```python\nx[0](a.b)\n```\n", "", "\n```python\nx[0](a.b)\n```\n"),
        ("`x[0](a.b)`", "", "`x[0](a.b)`"),
    ],
)  # fmt: skip
def test_a_link_leads_to_a_page_or_becomes_its_words(link, folder, becomes):
    assert HERE.localized(f"See {link}.", folder) == f"See {becomes}."


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("[MIT](LICENSE)", "[MIT](https://github.com/x/y/tree/main/LICENSE)"),
        ("[how](.github/CONTRIBUTING.md#tests)", "[how](https://github.com/x/y/blob/main/.github/CONTRIBUTING.md#tests)"),
        ("[02](notebooks/02_read_image.ipynb)", "[02](/notebooks/02_read_image.ipynb)"),
    ],
)  # fmt: skip
def test_with_an_address_of_the_project_other_files_are_linked_there(link, becomes):
    assert PUBLIC.localized(link) == becomes
