"""Rounding is distinguished from bugs: the noise floor, what it explains, wrong ends and the
verdict.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import plain_greedy

from specens.audit.examine import examine
from specens.audit.identity import (
    Deficits,
    Divergence,
    deficits_of,
    end_fault,
    identity_verdict,
    is_explained,
    more_than_control,
    noise_floor,
    noise_limit,
)
from specens.audit.outputs import Output, chosen
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.generation import SamplingOptions
from specens.decoding.loop import Decoder
from specens.decoding.stopping import StopRules
from specens.decoding.target.target import Target
from specens.decoding.verify import Coupled
from specens.drafters.none import NoDrafter


def test_a_divergence_is_explained_only_by_a_near_tie_of_both_tokens():
    floors = (0.01, 0.01)
    assert is_explained(0.019, 0.02, floors, same_as_control=False)
    assert not is_explained(0.021, 0.0, floors, same_as_control=True)  # AR decoding is sure
    assert not is_explained(0.0, 0.021, floors, same_as_control=True)  # the reference knows better
    assert is_explained(0.0, 0.03, (0.01, 0.02), same_as_control=False)
    # cut off by top-p: AR decoding in chunks does so too
    assert is_explained(math.inf, 0.0, floors, same_as_control=True)
    assert not is_explained(math.inf, 0.0, floors, same_as_control=False)


def test_the_noise_floor_is_a_percentile_with_a_least_value():
    differences = np.array([[0.0, -0.5], [0.25, np.nan]])
    assert noise_floor(differences, 10.0, 2**-23) == 0.5
    assert noise_floor(np.linspace(0, 1, 10001), 1.0, 2**-23) == pytest.approx(0.999)
    assert noise_floor(np.zeros(4), 16.0, 2**-23) == 16 * 4 * 2**-23
    assert noise_floor(np.zeros(4), 16.0, 2**-7) == 16 * 2**-7
    assert noise_floor(np.array([np.inf, np.nan]), 1.0, 0.5) == 0.5
    assert noise_limit(16.0, 2**-8) == 1.0


def test_deficits_count_those_beyond_twice_the_floor():
    assert deficits_of(np.array([0.0, 0.0, 0.2, 0.05]), 0.05) == Deficits(0.5, 0.2, 1)
    assert deficits_of(np.array([]), 0.05) == Deficits(0.0, 0.0, 0)


def test_the_verdict_is_the_worst_of_what_was_found():
    none = Deficits(0.0, 0.0, 0)
    bug = Divergence("p", 0, 3, 1, 2, "rescoring", 1.0)
    rounding = replace(bug, is_explained=True)
    assert identity_verdict([], none) == "identical"
    assert identity_verdict([rounding], none) == "explained by rounding"
    assert identity_verdict([rounding, bug], none) == "BUG"
    assert identity_verdict([], none, faults=["p: it is empty"]) == "BUG"
    assert identity_verdict([], Deficits(0.1, 1.0, 1)) == "BUG"
    assert identity_verdict([], none, is_noise=False) == "BUG"
    assert identity_verdict([], none, is_more=True) == "BUG"


def test_more_divergences_than_the_control_are_told_from_chance():
    assert not more_than_control(0, 0)
    assert not more_than_control(10, 4)
    assert more_than_control(30, 0)
    assert not more_than_control(30, 15)
    assert more_than_control(300, 60)


def test_wrong_ends_are_named():
    stop = StopRules(6, (9,))

    def fault(output, reason, baseline=None):
        return end_fault(stop, Output("p", (1, 2), tuple(output), reason, 0, baseline))

    assert fault([3, 9], "eos") is None
    assert fault([3, 4, 5, 6], "length") is None
    assert fault([], None) == "it is empty"
    assert "goes on after token 2" in fault([3, 9, 4], "eos")
    assert "no stop rule does" in fault([3, 4], "eos")
    assert "ends for eos, but length is recorded" in fault([3, 9], "length")
    assert "recorded baseline 1" in fault([3, 9], "eos", (3,))


def test_a_baseline_that_differs_is_examined_and_has_to_be_explained(tiny):
    ids = tuple(plain_greedy(tiny, [5, 6, 7], 8))
    other = (*ids[:4], (ids[4] + 1) % 128, *ids[5:])
    outputs = [Output(str(i), (5, 6, 7), ids, "length", 0, ids) for i in range(9)]
    outputs[5] = replace(outputs[5], baseline_ids=other)
    assert [output.prompt_id for output in chosen(outputs, 3)] == ["0", "3", "5", "6"]
    assert [output.prompt_id for output in chosen(outputs, 30)] == [str(i) for i in range(9)]
    target = Target(tiny)
    config = SamplingOptions(max_new_tokens=8).generation_config(target)
    decoder = Decoder(target, NoDrafter(), FixedBudget(), Coupled())
    found = examine(decoder, config, [outputs[5]], 4)
    (one,) = found.divergences
    assert (one.source, one.position) == ("baseline", 4)
    assert (one.ar_token, one.output_token) == (other[4], ids[4])
    assert not one.is_explained and found.identity == "BUG" and not found.is_lossless
