"""Check a built site with axe-core, in Chromium, in light and dark and at two widths.

    npm pack axe-core && tar -xzf axe-core-*.tgz     # gives package/axe.min.js
    python -m labkit site pages
    python -m tests.hardening.accessibility package/axe.min.js pages

Prints what it finds for each page, and exits with 1 if anything is serious or critical.
"""

import sys
from collections import Counter
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.lab_server import FLAGS, find_chromium

_GRAVE = ("serious", "critical")


def main(axe: Path, site: Path) -> int:
    """Check all pages; the number of those with a grave violation."""
    grave = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(playwright), args=FLAGS)
        for width in (1200, 390):
            for scheme in ("light", "dark"):
                options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
                page = browser.new_context(offline=True, bypass_csp=True, **options).new_page()
                for path in sorted(site.rglob("*.html")):
                    found = check_page(page, path.absolute(), axe)
                    counts = Counter(each["impact"] for each in found)
                    print(f"{path.relative_to(site)!s:<40} {width:>4} {scheme:<5} {dict(counts) or 'nothing'}")
                    for each in found:
                        print(
                            f"    {each['impact']} {each['id']}: {each['help']}, {len(each['nodes'])} places, such as"
                        )
                        print(f"        {each['nodes'][0]['html'][:160]}")
                    grave += any(impact in counts for impact in _GRAVE)
        browser.close()
    print(f"{grave} pages with something serious or critical")
    return grave


def check_page(page, path: Path, axe: Path) -> list[dict]:
    """axe-core's violations on a page."""
    page.goto(path.as_uri())
    page.add_script_tag(path=str(axe))
    return page.evaluate("() => axe.run().then(found => found.violations)")


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])) > 0 if len(sys.argv) == 3 else __doc__)
