"""python -m specens.bench <overrides of specens.run> bench.systems=[AR,ngram]: how fast, against AR
decoding and other implementations?
"""

from __future__ import annotations

from specens.cli import Call, command
from specens.errors import UserError


def refuse_growth(given: list[str]) -> list[str]:
    """The overrides; growth studies, which the bench had up to 0.1, are now a script."""
    for word in given:
        if word.lstrip("+~").startswith("bench.growth"):
            raise UserError(
                f"{word}: growth studies are now python experiments/06-growth/growth.py"
            )
    return given


@command(
    "bench", interrupted="interrupted; what was measured is in {folder}", rewrite=refuse_growth
)
def main(call: Call) -> None:
    from specens.bench.bench import bench  # torch only when something is measured

    done = bench(call.config, call.folder, call.overrides, call.hydra)
    systems = done["systems"].values()
    failed = sum(system["num_failed"] for system in systems)
    if failed:
        whole = sum(system["num_decodings"] for system in systems)
        raise UserError(f"{failed} of {whole} decodings failed, the others are in {call.folder}")


if __name__ == "__main__":
    main()
