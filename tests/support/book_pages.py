"""Fixtures of the reading edition, for every test file: built once, opened in Chromium, offline."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (400, 800, 1400)


def build():
    """Run book/pages.py, once for all workers of a test run; .ci/run has just done so itself."""
    if os.environ.get("THREE_POLICIES_BOOK_BUILT") == "1":
        return
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    with (Path(tempfile.gettempdir()) / f"three-policies-book-{run}").open("a+") as stamp:
        fcntl.flock(stamp, fcntl.LOCK_EX)
        stamp.seek(0)
        if stamp.read() == "built":
            return
        built = subprocess.run([sys.executable, "book/pages.py"], cwd=ROOT, capture_output=True,
                               text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert built.returncode == 0, built.stderr
        stamp.write("built")


@pytest.fixture(scope="session")
def book():
    """Write site/, and return book/pages.py as a module."""
    packages = ("markdown_it", "mdit_py_plugins", "pygments", "playwright")
    missing = [f"{name} (requirements/book.txt)" for name in packages
               if importlib.util.find_spec(name) is None]
    missing += [] if shutil.which("node") else ["node"]
    missing += ([] if (ROOT / "book/assets/node_modules/katex").is_dir()
                else ["KaTeX (npm install --prefix book/assets)"])
    missing += [] if CHROMIUM else ["Chromium (Debian's package chromium)"]
    if missing and os.environ.get("THREE_POLICIES_REQUIRE_BOOK") == "1":
        pytest.fail(f"missing: {', '.join(missing)}, "
                    "and THREE_POLICIES_REQUIRE_BOOK=1 makes that a failure")
    if missing:
        pytest.skip(f"missing: {', '.join(missing)}")
    build()
    from three_policies.book import pages
    return pages


@pytest.fixture(scope="module")
def browser(book):
    """Yield Chromium, closed with this file: its event loop must not run while others' tests do."""
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] * (os.geteuid() == 0))
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """A page at a width; what it asked for, and what it complained of, are kept with it."""
    contexts = []

    def opened(name, width=1400, **options):
        contexts.append(browser.new_context(
            viewport={"width": width, "height": 900}, offline=True, **options))
        page = contexts[-1].new_page()
        page.asked, page.complaints = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("requestfailed", lambda request: page.complaints.append(f"{request.url} failed"))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda message:
                page.complaints.append(message.text) if message.type == "error" else None)
        page.goto((OUT / name.split("#")[0]).as_uri()
                  + ("#" + name.split("#")[1] if "#" in name else ""))
        return page

    yield opened
    for context in contexts:
        context.close()
