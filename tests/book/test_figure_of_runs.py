"""`python book/figures.py runs` groups runs into lines, and computes the lines' numbers.

What it says of mistakes is tested, too.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import yaml
from matplotlib.colors import to_rgba
from PIL import Image

from three_policies.checks import UserError
from three_policies.tests.support.launching import shell

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures():
    from three_policies.book import figures
    yield figures
    figures.plt.close("all")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_run(name, metrics, **settings):
    """Write a run of synthetic metrics, {metric: a value per step, None where it has none}.

    Settings are given as train__lr=1.
    """
    directory, nested = Path("runs") / name, {"run": name, "seed": 0}
    directory.mkdir(parents=True)
    for key, value in settings.items():
        section, _, field = key.partition("__")
        if field:
            nested.setdefault(section, {})[field] = value
        else:
            nested[key] = value
    (directory / "config.yaml").write_text(yaml.safe_dump(nested))
    lines = [{"step": i + 1} | {metric: values[i] for metric, values in metrics.items()
                                if values[i] is not None}
             for i in range(max(map(len, metrics.values())))]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_usual(name, seed=0, steps=4, **settings):
    """Write a run with every metric of the default panels.

    It has the accuracy at step 1 and at every even step.
    """
    x = [0.1 * (i + 1) + 0.01 * seed for i in range(steps)]
    write_run(name, {
        "reward/mean": x, "response/length_mean": x, "rollout_corr/k3_kl": x,
        "rollout_corr/chi2_token": x, "grad_norm": x,
        "eval/accuracy": [v if i % 2 or not i else None for i, v in enumerate(x)]},
              seed=seed, **settings)


def grouped(figures, *names):
    return figures.groups_of([figures.read_run(name) for name in names])


def names_in(groups):
    return {name: [Path(run.name).name for run in runs] for name, runs in groups.items()}


# --------------------------------------------------------------------------- groups and their names

def test_runs_that_differ_in_their_seed_alone_are_one_group(figures):
    """A group ignores a run's name, and settings that may change when a run is continued."""
    write_usual("a", 0, correction__preset="disabled", train__steps=4)
    write_usual("b", 0, correction__preset="decoupled_token_is", train__steps=4)
    write_usual("c", 1, 6, correction__preset="disabled", train__steps=6, train__eval_every=2,
                rollout__timeout=9.0)
    assert names_in(grouped(figures, "b", "a", "c")) == {
        "correction.preset=decoupled_token_is": ["b"], "correction.preset=disabled": ["a", "c"]}
    assert names_in(grouped(figures, "a", "c")) == {"same settings": ["a", "c"]}
    assert names_in(grouped(figures, "runs/a")) == {"a": ["a"]}


def test_a_group_is_named_by_what_differs_and_by_nothing_else(figures):
    same = dict(task__kind="dyck", rollout__quantize_bits=4)
    write_usual("a", correction={"preset": "disabled"}, train__lr=1e-5, **same)
    write_usual("b", correction={"preset": "disabled", "rollout_rs": {"token_k1": [0.5, 2.0]}},
                train__lr=2e-5, **same)
    write_usual("c", correction={"rollout_is": None}, train__lr=1e-5, **same)
    assert list(grouped(figures, "a", "b", "c")) == [
        "correction.preset=disabled, train.lr=1e-05",
        "correction.preset=disabled, correction.rollout_rs.token_k1=[0.5, 2.0], train.lr=2e-05",
        "correction.rollout_is=null, train.lr=1e-05"]


def test_a_group_that_lacks_what_differs_is_named_by_that(figures):
    write_usual("a", correction={"preset": "disabled"})
    write_usual("b", correction={"preset": "disabled", "rollout_is": "token"})
    assert list(grouped(figures, "a", "b")) == [
        "no correction.rollout_is", "correction.rollout_is=token"]


def test_numbers_and_defaults_are_compared_by_what_they_mean(figures):
    """2 equals 2.0, and a setting that an older version did not write has its default."""
    write_usual("a", 0, correction={"rollout_is": "token", "rollout_is_threshold": 2})
    write_usual("b", 1, correction={"rollout_is": "token", "rollout_is_threshold": 2.0},
                rollout__min_p=0.0)
    assert names_in(grouped(figures, "a", "b")) == {"same settings": ["a", "b"]}


# ------------------------------------------------------------------------- the numbers of the lines

def drawn(figures, groups, metric):
    """Return the line of each group, {step: mean}, and its band, {step: {low, high}}."""
    axis = figures.draw_runs(groups, [metric]).axes[0]
    lines = [dict(zip(*line.get_data(), strict=True)) for line in axis.lines]
    bands = [{} for _ in axis.collections]
    for found, collection in zip(bands, axis.collections, strict=True):
        for x, y in collection.get_paths()[0].vertices.tolist():
            found.setdefault(x, set()).add(y)
    return axis, lines, bands


def close(x):
    return pytest.approx(x, rel=1e-12)


def test_line_and_band_of_three_seeds_are_mean_and_standard_deviation(figures):
    """The mean of 0.1, 0.4, 0.7 is 0.4, the deviation √((0.3² + 0² + 0.3²)/2) = 0.3.

    Those of 1, 2, 6 are 3 and √((4 + 1 + 9)/2) = √7.
    """
    for seed, values in enumerate([(0.1, 1.0), (0.4, 2.0), (0.7, 6.0)]):
        write_run(str(seed), {"x": values}, seed=seed)
    _, [line], [band] = drawn(figures, grouped(figures, "0", "1", "2"), "x")
    assert line == close({1: 0.4, 2: 3.0})
    assert (sorted(band[1]) == close([0.1, 0.7])
            and sorted(band[2]) == close([3 - math.sqrt(7), 3 + math.sqrt(7)]))


def test_two_seeds_have_their_range_and_one_has_no_band(figures):
    write_run("a", {"x": [1.0, 4.0]}, seed=0)
    write_run("b", {"x": [2.0, 2.0]}, seed=1)
    write_run("c", {"x": [5.0, 7.0]}, seed=0, correction__preset="disabled")
    axis, lines, [band] = drawn(figures, grouped(figures, "a", "b", "c"), "x")
    assert lines == [{1: 1.5, 2: 3.0}, {1: 5.0, 2: 7.0}] and band == {1: {1.0, 2.0}, 2: {2.0, 4.0}}
    texts = [text.get_text() for text in axis.figure.legends[0].get_texts()]
    assert texts == ["no correction.preset: mean and range of 2 seeds",
                     "correction.preset=disabled: 1 seed"]


def test_a_step_counts_where_all_seeds_have_it_and_the_rest_is_said(figures):
    """The shortest of runs of different length ends the line.

    NaN, as in a step that kept nothing, is no number.
    """
    write_run("a", {"x": [1.0, 2.0, None, 4.0, 5.0]}, seed=0)
    write_run("b", {"x": [3.0, math.nan, 1.0, 6.0]}, seed=1)
    write_run("c", {"y": [3.0, 2.0]}, seed=1, correction__preset="disabled")
    groups = grouped(figures, "a", "b")
    _, [line], [band] = drawn(figures, groups, "x")
    assert line == {1: 2.0, 4: 5.0} and set(band) == {1, 4}
    assert list(figures.left_out(grouped(figures, "a", "b", "c"), ["x"])) == [
        "no correction.preset: drawn up to step 4, where its shortest run ends; its longest has 5",
        "no correction.preset: x is left out at 2 steps, where not all of its runs have a number",
        "correction.preset=disabled: no x, as at no step do all of its runs have a number"]


def test_the_axis_of_k3_is_logarithmic_where_every_value_is_positive(figures):
    for name, values in {"a": [1e-4, 3e-2], "b": [1e-4, 0.0]}.items():
        write_run(name, {"rollout_corr/k3_kl": values, "x": values})
    scales = {name: drawn(figures, grouped(figures, name), "rollout_corr/k3_kl")[0].get_yscale()
              for name in "ab"}
    assert scales == {"a": "log", "b": "linear"}
    assert drawn(figures, grouped(figures, "a"), "x")[0].get_yscale() == "linear"


def test_the_view_is_what_the_seeds_reach(figures):
    """The band of 0, 1, 1 is 2/3 ± 0.58, but no seed reached 1.24, so the view ends at 1."""
    for seed, x in enumerate((0.0, 1.0, 1.0)):
        write_run(str(seed), {"x": [x, x]}, seed=seed)
    axis, _, [band] = drawn(figures, grouped(figures, "0", "1", "2"), "x")
    assert max(band[1]) > 1.2 and axis.get_ylim() == close((-0.05, 1.05))


def test_ess_is_that_of_tokens_in_every_run(figures):
    """ESS is computed from tokens in every run, even where a run's metric is of sequences.

    The metrics themselves cannot stand side by side.
    """
    write_run("a", {"rollout_corr/chi2_token": [0.25, -0.1],
                    "rollout_corr/rollout_is_raw_eff_sample_size": [0.01, 0.01]})
    assert drawn(figures, grouped(figures, "a"), "ESS/N_token")[1] == [{1: 0.8, 2: 1.0}]


# ------------------------------------------------------------------------------------- how it looks

@pytest.mark.parametrize(
    "count,preset", [(1, "short"), (3, "short"), (12, "short"), (3, "x" * 300), (2, "$2^{$ _")])
def test_the_legend_stands_above_all_panels(figures, count, preset):
    for i in range(count):
        write_usual(f"m{i}", correction__preset=f"{preset}{i}", rollout__staleness=i)
    groups = grouped(figures, *(f"m{i}" for i in range(count)))
    figure = figures.draw_runs(groups, figures.PANELS[:5])
    figure.canvas.draw()
    [legend], boxes = figure.legends, [axis.get_tightbbox() for axis in figure.axes]
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == count and not any(box.overlaps(other) for other in boxes)
    assert box.y0 >= max(other.y1 for other in boxes)
    # Nothing is cut, nor squeezed.
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert min(axis.get_window_extent().height for axis in figure.axes) > 100
    for axis, other in ((a, b) for i, a in enumerate(boxes) for b in boxes[:i]):
        assert not axis.overlaps(other)


def test_no_panel_is_empty_and_few_points_have_markers(figures):
    write_usual("a", steps=60)
    groups = grouped(figures, "a")
    figure = figures.draw_runs(groups, figures.panels_of(None, groups["a"]))
    assert ([axis.get_title() for axis in figure.axes] == figures.PANELS
            and all(axis.lines for axis in figure.axes))
    every = {axis.get_title(): axis.lines[0].get_markevery()[1] for axis in figure.axes}
    # Every one of 31 points has a marker, and every sixth one of 60.
    assert every["eval/accuracy"] == 1 and every["reward/mean"] == 6
    write_run("b", {"grad_norm": [1.0]})
    assert figures.panels_of(None, grouped(figures, "b")["b"]) == ["grad_norm"]


def test_groups_are_told_apart_without_colours(figures):
    looks = [figures.look_of(i) for i in range(40)]
    assert len({(to_rgba(x["color"]), str(x["linestyle"]), x["marker"]) for x in looks}) == 40
    assert len({(str(x["linestyle"]), x["marker"]) for x in looks}) == 40
    assert len({str(x["linestyle"]) for x in looks[:7]}) == 7


# ------------------------------------------------------------------------ the command and its words

def test_the_command_draws_and_prints_a_table(figures, capsys):
    """A run that still trains is drawn, too: its last line may not be whole."""
    for seed in range(3):
        write_usual(f"off{seed}", seed, correction__preset="disabled")
    write_usual("is0", 0, 5, correction__preset="decoupled_token_is")
    write_usual("is1", 1, correction__preset="decoupled_token_is")
    write_run("one", {"reward/mean": [0.5], "eval/accuracy": [0.25]},
              correction__preset="decoupled_seq_is")
    with Path("runs/is1/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')
    assert figures.compare_runs(
        ["off0", "off1", "runs/off2", str(Path("runs/is0").resolve()), "is1", "one"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "                                      seeds  steps   "
        "accuracy, first → last                       last reward           last k3",
        "correction.preset=disabled            3      4       "
        "0.110 ± 0.010 → 0.410 ± 0.010                0.410 ± 0.010         4.1e-01 ± 1.0e-02",
        "correction.preset=decoupled_token_is  2      4 to 5  "
        "0.105 [0.100, 0.110] → 0.405 [0.400, 0.410]  0.405 [0.400, 0.410]  "
        "4.1e-01 [4.0e-01, 4.1e-01]",
        "correction.preset=decoupled_seq_is    1      1       "
        "0.250 → –                                    0.500                 –",
        "* correction.preset=decoupled_token_is: drawn up to step 4, where its shortest run ends; "
        "its longest has 5",
        *(f"* correction.preset=decoupled_seq_is: no {metric}, as at no step do all of its runs "
          "have a number"
          for metric in ("response/length_mean", "rollout_corr/k3_kl", "ESS/N_token", "grad_norm")),
        "runs/compared.png"]
    with Image.open("runs/compared.png") as image:
        assert image.width > 1000 and len(image.convert("RGB").getcolors(10 ** 6)) > 50


def test_runs_that_only_split_their_work_otherwise_are_compared(figures):
    """Rounding alone differs; a continued run may change this, and chapter 11 compares two."""
    for name, size in (("one", 256), ("two", 128)):
        write_run(name, {"x": [1.0]}, seed=0, train__micro_batch_size=size, train__keep=size)
    assert [*grouped(figures, "one", "two")] == [
        "train.micro_batch_size=256", "train.micro_batch_size=128"]


def test_metrics_and_file_are_chosen(figures, capsys):
    write_run("a", {"x": [1.0], "y": [2.0], "z": [3.0]})
    assert figures.compare_runs(["a", "--metrics", "z,x,z", "--out", "new/folder/b.svg"]) == 0
    assert (capsys.readouterr().out.endswith("\nnew/folder/b.svg\n")
            and "<svg" in Path("new/folder/b.svg").read_text())
    assert figures.panels_of(["z", "x", "z"], [figures.read_run("a")]) == ["z", "x"]


def damage(file, text):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)


METRICS, CONFIG = "runs/b/metrics.jsonl", "runs/b/config.yaml"
MISTAKES = {
    "no such run": (lambda: None, "rnn3", [],
                    "rnn3 is not a run: neither rnn3 nor runs/rnn3 has a config.yaml; "
                    "did you mean run3?"),
    "a file": (lambda: damage("x.png", ""), "x.png", [],
               "x.png is not a run: neither x.png nor runs/x.png has"),
    "no metrics": (lambda: Path(METRICS).unlink(), "b", [],
                   "runs/b has no metrics yet: its first step has not ended"),
    "empty metrics": (lambda: damage(METRICS, ""), "b", [], "runs/b has no metrics yet"),
    "half a line": (lambda: damage(METRICS, '{"step": 1'), "b", [], "runs/b has no metrics yet"),
    "a damaged line": (lambda: damage(METRICS, '{"st\n{"step": 2}\n'), "b", [],
                       f"{METRICS} has a line that is not the"),
    "a word": (lambda: damage(METRICS, '{"step": 1, "x": "word"}\n'), "b", [],
               f"{METRICS} has a line with something else"),
    "null": (lambda: damage(METRICS, '{"step": 1, "x": null}\n'), "b", [],
             f"{METRICS} has a line with something else"),
    "endless": (lambda: damage(METRICS, '{"step": Infinity}\n'), "b", [],
                f"{METRICS} has a line with something else"),
    "no settings": (lambda: Path(CONFIG).unlink(), "b", [],
                    f"{CONFIG} cannot be read: No such file"),
    "empty settings": (lambda: damage(CONFIG, ""), "b", [],
                       f"{CONFIG} is not the settings of a run: it has no seed"),
    "a list": (lambda: damage(CONFIG, "- 1\n- 2\n"), "b", [],
               f"{CONFIG} must be a mapping"),
    "an object": (lambda: damage(CONFIG, "seed: !!python/object/apply:os.getcwd []"), "b", [],
                  f"{CONFIG} cannot be read as YAML"),
    "twice": (lambda: None, "runs/run3", [],
              "runs/run3 and runs/run3 have the same settings and the same seed, 0: leave"),
    "an unknown metric": (lambda: None, "b", ["--metrics", "x,reward/meen"],
                          "--metrics: no run has a number named 'reward/meen'; "
                          "did you mean reward/mean?"),
    "nothing to draw": (lambda: damage(METRICS, '{"step": 1, "y": 1}\n'), "b", [],
                        "correction.preset=disabled: nothing can be compared, as there is no step "
                        "at which all of runs/b have one of reward/mean"),
    "nothing finite": (lambda: damage(METRICS, '{"step": 1, "y": NaN}\n'), "b", ["--metrics", "y"],
                       "--metrics: no run has a number named 'y'; did you mean x?"),
    "no picture": (lambda: None, "b", ["--out", "a.jpeg2000"],
                   "--out=a.jpeg2000 must end in .png, .pdf or .svg"),
    "no room": (lambda: damage("taken", ""), "b", ["--metrics", "x", "--out", "taken/a.png"],
                "taken/a.png cannot be written: "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(figures, capsys, mistake):
    write_run("run3", {"x": [1.0, 2.0], "reward/mean": [1.0, 2.0]})
    write_run("b", {"x": [1.0, 2.0]}, correction__preset="disabled")
    spoil, run, options, sentence = MISTAKES[mistake]
    spoil()
    assert figures.compare_runs(["run3", run, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"figures.py: {sentence}") and err.count("\n") == 1
    assert not Path("runs/compared.png").exists()


def test_runs_of_a_group_that_share_no_step_cannot_be_compared(figures):
    write_run("a", {"x": [1.0, None]}, seed=0)
    write_run("b", {"x": [None, 1.0]}, seed=1)
    with pytest.raises(UserError, match="^same settings: nothing can be compared, as there is no "
                       "step at which all of runs/a, runs/b have one of x$"):
        figures.compare(["a", "b"], ["x"], Path("a.png"))


def test_the_script_itself_takes_runs(forks, tmp_path):
    found = shell([sys.executable, *forks, str(ROOT / "book/figures.py"), "runs", "nowhere"],
                  tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == ("figures.py: nowhere is not a run: neither nowhere nor runs/nowhere "
                            "has a config.yaml\n")
