// One stop of the Tab key per text; the arrow keys then go from step to step. Without this script
// every step is a stop.
for (const answer of document.querySelectorAll(".answer")) {
  const steps = [...answer.querySelectorAll(".step")];
  const stop = (chosen) => steps.forEach((step) => (step.tabIndex = step === chosen ? 0 : -1));
  stop(steps[0]);
  answer.addEventListener("focusin", (event) => stop(event.target));
  answer.addEventListener("keydown", (event) => {
    const at = steps.indexOf(event.target), next = at + 1, before = at - 1;
    const keys = { ArrowRight: next, ArrowDown: next, ArrowLeft: before, ArrowUp: before };
    const to = { ...keys, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") event.target.blur();
    if (to === undefined) return;
    event.preventDefault();
    steps[to]?.focus();
  });
}
