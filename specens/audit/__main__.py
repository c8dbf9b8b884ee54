"""python -m specens.audit <overrides of specens.run>, or run=<folder>: is the output the target's
own?

The audit re-scores the output with the target alone, one token per forward pass; it does not use
the decoding loop, verifier or drafters. Every check has a negative control. Exit code 0: identical,
or explained by rounding, and the distribution is not rejected; 2: not lossless; 1: bad input.
"""

from __future__ import annotations

from pathlib import Path

from specens.cli import Call, command
from specens.errors import UserError

NOT_LOSSLESS = 2


def with_folder(given: list[str]) -> list[str]:
    """The audit of a finished run logs in its folder, and leaves no run folder of its own."""
    runs = [entry.removeprefix("run=") for entry in given if entry.startswith("run=")]
    if not runs or any(entry.startswith("hydra.run.dir=") for entry in given):
        return given
    folder = Path(runs[-1].strip("'\"")).expanduser()
    if not (folder / ".hydra").is_dir():
        return given
    quoted = str(folder / "audit").replace("'", "\\'")
    return [*given, f"hydra.run.dir='{quoted}'"]


@command("audit", interrupted="interrupted; nothing was concluded", rewrite=with_folder)
def main(call: Call) -> int:
    from specens.audit.audit_run import audit

    found = audit(call.config, call.folder, call.overrides, call.hydra)
    if found.is_lossless:
        return 0
    if call.is_sweep:  # a failed job of the sweep; the others go on
        raise UserError(f"{found.verdict}: {found.folder}/audit.txt")
    return NOT_LOSSLESS


if __name__ == "__main__":
    main()
