"""The page in a real browser: headless Chromium, from a file, without a network. Skipped where there is no Chromium."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_html import EVIL, PIECES, REPLAY, page, tables

from specens.analysis.html import report
from specens.analysis.metrics import summarise

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

PROBE = """
const found = { blocked: [] };
document.addEventListener("securitypolicyviolation", (event) => found.blocked.push(event.violatedDirective));
addEventListener("load", async () => {
  PROBE
  document.documentElement.dataset.found = JSON.stringify(found);
});
"""


def look(folder: Path, text: str, probe: str, *, width: int = 1280, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `probe`, a piece of script, put into `found` when the page was loaded."""
    script = PROBE.replace("PROBE", probe)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    seen = text.replace("script-src ", f"script-src &#x27;sha256-{digest}&#x27; ", 1)
    seen = seen.replace("<style>", f"<script>{script}</script><style>", 1)
    (folder / "page.html").write_text(seen, encoding="utf-8")
    dom = chromium(folder, f"--window-size={width},900", *options, "--dump-dom")
    (answer,) = re.findall(r'<html[^>]* data-found="([^"]*)"', dom)
    return json.loads(html.unescape(answer))


def chromium(folder: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--timeout=20000", *options, (folder / "page.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def whole() -> str:
    """A page with everything on it: texts, notices, failures, a replay."""
    prompts, steps, drafts = tables(num_prompts=3)
    prompts["output_pieces"] = [PIECES, [EVIL, *PIECES[1:]], PIECES]
    prompts.loc[2, "error"] = EVIL
    summary = {**summarise(prompts, steps, drafts), "lossy": True, "verifier": "typical"}
    return report(
        prompts, steps, drafts, summary, title="A run with a long name " * 4, replay=REPLAY, notices=["skipped x"]
    )


def test_nothing_is_blocked_or_fetched_and_texts_stay_texts(tmp_path: Path, whole: str) -> None:
    found = look(
        tmp_path,
        whole,
        """
        found.fetched = performance.getEntriesByType("resource").length;
        found.scripts = document.scripts.length;
        found.text = document.querySelectorAll(".answer")[1].textContent;
        """,
    )
    assert found["blocked"] == [] and found["fetched"] == 0
    assert found["scripts"] == 3, "the page's own, the probe, and none of the texts'" if False else found
    assert "<script>alert('x')</script>" in found["text"]
