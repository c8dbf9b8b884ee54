"""The page in a real browser: headless Chromium, from a file (pytest -m slow). Skipped where there
is no Chromium.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pages import EVIL, PIECES, REPLAY, page, tables

from specens.analysis.summary import summarise
from specens.report.markup import visible
from specens.report.page import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

PROBE = """
const frame = document.querySelector("iframe"), found = {}, blocked = [];
frame.onload = async () => {
  const page = frame.contentDocument, all = (what) => [...page.querySelectorAll(what)];
  const style = (one, what) => frame.contentWindow.getComputedStyle(one, what);
  const keydown = (key) => new KeyboardEvent("keydown", { key, bubbles: true });
  const press = (key) => page.activeElement.dispatchEvent(keydown(key));
  await new Promise((done) => setTimeout(done, 300));
  %s
  document.documentElement.dataset.found = JSON.stringify(found);
};
frame.srcdoc = %s;
"""


def chromium(path: Path, *options: str) -> str:
    """The document when it was loaded, and what scripts made of it by then."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--enable-logging=stderr", f"--user-data-dir={path.parent / 'profile'}"]
    command += [*options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    refused = [line for line in done.stderr.splitlines() if "Content Security Policy" in line]
    assert refused == []
    return done.stdout


def look(folder: Path, text: str, probe: str, width: int = 1280) -> dict[str, Any]:
    """What `probe`, a piece of script, put into `found`, looking from outside at the untouched page
    in a frame of that width.
    """
    script = PROBE % (probe, json.dumps(text).replace("</", "<\\/"))
    path = folder / "look.html"
    frame = f"<iframe style='width:{width}px;height:900px;border:0'></iframe>"
    outer = f"<!doctype html><meta charset='utf-8'>{frame}<script>{script}</script>"
    path.write_text(outer, encoding="utf-8")
    loaded = chromium(path, "--virtual-time-budget=5000")
    (answer,) = re.findall(r'<html[^>]* data-found="([^"]*)"', loaded)
    return json.loads(html.unescape(answer))


@pytest.fixture(scope="module")
def whole() -> str:
    """A page with everything on it, and nothing short."""
    prompts, steps, drafts = tables(num_prompts=4)
    prompts["output_pieces"] = [PIECES, [EVIL, *PIECES[1:]], PIECES, PIECES]
    prompts["category"] = "a_category_with_a_name_that_is_rather_long"
    prompts.loc[2, "error"] = EVIL
    long_name = "a_drafter_with_a_name_that_is_longer_than_a_phone_is_wide"
    drafts["drafter"] = drafts["drafter"].replace("b", long_name)
    summary = {**summarise(prompts, steps, drafts), "lossy": True, "verifier": "typical"}
    summary["environment"] = {"a_key": "x" * 400}
    title, notices = "A run with a long name " * 4 + "x" * 80, ["skipped " + "y" * 200]
    return report(prompts, steps, drafts, summary, title=title, replay=REPLAY, notices=notices)


def test_nothing_is_blocked_or_fetched_and_texts_stay_texts(tmp_path: Path, whole: str) -> None:
    probe = """
      found.fetched = frame.contentWindow.performance.getEntriesByType("resource").length;
      found.scripts = page.scripts.length;
      found.text = all(".answer")[1].textContent;
      found.tint = style(all("mark")[0]).backgroundColor;
      found.letter = style(all("mark")[0], "::before").content;
    """
    found = look(tmp_path, whole, probe)
    assert (found["fetched"], found["scripts"]) == (0, 1)
    assert found["text"] == visible(EVIL) + "".join(PIECES[1:])
    assert found["letter"] == '"A"' and found["tint"].startswith("rgb("), "the style is in force"


def test_steps_are_shown_under_the_focus_and_the_arrow_keys_go_on(
    tmp_path: Path, whole: str
) -> None:
    probe = """
      const steps = all(".answer")[0].querySelectorAll(".step");
      const shown = () => style(page.activeElement, "::after").content;
      found.stops = all(".step").filter((step) => step.tabIndex == 0).length;
      steps[0].focus();
      found.first = shown();
      press("ArrowRight");
      found.second = [page.activeElement == steps[1], shown()];
      press("ArrowRight");
      found.last = page.activeElement == steps[1];
      found.stop = [...steps].map((step) => step.tabIndex);
      press("Escape");
      found.left = page.activeElement == page.body;
    """
    found = look(tmp_path, whole, probe)
    assert found["stops"] == 3, "one per text"
    assert "step 0: won by a with 2 tokens" in found["first"]
    assert found["second"][0] and "gap  4.50" in found["second"][1]
    assert found["last"] and found["left"] and found["stop"] == [-1, 0]


def test_without_its_script_the_page_is_as_readable(tmp_path: Path, whole: str) -> None:
    bare = re.sub(r"<script>.*?</script>", "", whole, flags=re.DOTALL)
    probe = """
      found.stops = all(".step").filter((step) => step.tabIndex == 0).length;
      all(".step")[1].focus();
      found.shown = style(page.activeElement, "::after").content;
    """
    found = look(tmp_path, bare, probe)
    assert found["stops"] == 6 and "step 1" in found["shown"]


def test_the_scheme_can_be_chosen(tmp_path: Path, whole: str) -> None:
    probe = """
      for (const scheme of ["light", "dark"]) {
        page.getElementById(scheme).click();
        const colours = (one) => [style(one).backgroundColor, style(one).color];
        found[scheme] = [page.body, all(".banner")[0]].map(colours);
      }
    """
    found = look(tmp_path, whole, probe)
    assert found["light"][0] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    assert found["dark"][0] == ["rgb(20, 23, 27)", "rgb(228, 231, 235)"]


@pytest.mark.parametrize("width", [320, 360, 1280])
def test_only_tables_scroll_sideways(tmp_path: Path, whole: str, width: int) -> None:
    probe = """
      all("details").forEach((one) => (one.open = true));
      all(".step")[2].focus();
      found.size = [frame.contentWindow.innerWidth, page.documentElement.scrollWidth];
      const width = frame.contentWindow.innerWidth;
      const leaves = (one) => one.getBoundingClientRect().right > width;
      const wide = all("main *").filter((one) => !one.closest(".scroll > *, svg") && leaves(one));
      found.wide = wide.map((one) => one.outerHTML.slice(0, 200));
    """
    found = look(tmp_path, whole, probe, width)
    assert found["wide"] == []
    assert found["size"][0] == width >= found["size"][1]


@pytest.mark.slow  # for its clock, which a busy machine would upset
def test_the_first_paint_of_a_large_page_takes_less_than_a_second(tmp_path: Path) -> None:
    """39 prompts of 128 tokens. The time is the browser's own, since it began to open the file. A
    frame that stays open until it is known holds back the end of loading, when the browser leaves.
    """
    frames = tables(num_prompts=39, num_steps=43)
    text = page(*frames, pieces={f"p{number}": [" token"] * 129 for number in range(39)})
    observer = """<script>
      const hold = new Promise((done) => addEventListener("DOMContentLoaded", () => {
        const frame = document.body.appendChild(document.createElement("iframe"));
        frame.contentDocument.open();
        done(frame.contentDocument);
      }));
      new PerformanceObserver(async (list) => {
        document.documentElement.dataset.paint = list.getEntries()[0].startTime;
        (await hold).close();
      }).observe({ type: "paint", buffered: true });
    </script>"""
    text, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', observer, text)
    assert count == 1, "the policy would forbid the observer"
    path = tmp_path / "large.html"
    path.write_text(text, encoding="utf-8")
    (paint,) = re.findall(r'<html[^>]* data-paint="([\d.]+)"', chromium(path))
    assert 0 < float(paint) < 1000
