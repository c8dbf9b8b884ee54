"""python -m specens.run drafter=ensemble prompts=demo ..."""

from __future__ import annotations

from specens.cli import Call, command
from specens.errors import UserError
from specens.run import run


@command("run", interrupted="interrupted; finished prompts, if any, are in {folder}")
def main(call: Call) -> None:
    summary = run(call.config, call.folder, call.hydra)
    failed, whole = summary["num_failed"], summary["num_prompts"]
    if failed:
        raise UserError(f"{failed} of {whole} prompts failed, the others are in {call.folder}")


if __name__ == "__main__":
    main()
