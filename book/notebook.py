# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Three policies in fifty minutes
#
# In RL for language models, the policy that samples is never quite the policy that is
# trained. Here you look at the difference, measure it, and train with and without a
# correction. Of the fifty minutes five are computing, on one core, without GPU or
# download.
#
# `pip install -r requirements.txt -r requirements/notebook.txt`
#
# `jupyter lab math/notebook.ipynb`

# %% tags=["exact"]
import os
import tempfile
from pathlib import Path

here = globals().get("ROOT") or Path.cwd()      # if this cell is run again: what it found
ROOT = next(p for p in [here, *here.parents] if (p / "trainer.py").exists())
os.chdir(tempfile.mkdtemp())                    # what the runs write goes there

# %%
import contextlib
import io
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")
import torch
import transformers
from IPython.display import Image, display
from matplotlib.figure import Figure

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# ## 1. Do two engines agree?
#
# Give a trainer and a sampler the same weights. Do they compute the same probabilities?
#
# To find out we need a model, so we teach a tiny one to sort eight digits. It learns only
# some of the answers, which leaves something for RL to do. This takes about a minute.

# %%
from three_policies.training.faults import process_group
from three_policies.training.settings import load_config
from three_policies.training.demo import make_demo_model
from three_policies.training.tasks import make_task

TASK = ["seed=3", "task.kind=sort", "task.size=8", "task.eval_size=512"]
config = load_config(TASK)
task = make_task(config.task, config.seed)
with process_group(), contextlib.redirect_stderr(io.StringIO()):
    path = make_demo_model(config, task)
print("asked:", task.train[0].question, "  right answer:", task.train[0].answer)

# %% [markdown]
# **The sampler** answers 512 questions, and records the log-probability of every token
# that it draws: log μ. Its weights can be cast to 16 bits, or rounded to 4.

# %%
from three_policies.engines.choice import make_engine
from three_policies.rollout import quantize_weights

model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
tokenizer = transformers.AutoTokenizer.from_pretrained(path)
prompts = tokenizer([problem.question for problem in task.train[:512]]).input_ids

def answers(dtype, bits):
    engine = make_engine("transformers", path, dtype=dtype, max_model_len=32)
    engine.update_weights(quantize_weights(model.named_parameters(), bits))
    return engine.generate(prompts, range(512), temperature=1.0, max_tokens=10,
                           eos_ids=[tokenizer.eos_token_id])

# %% [markdown]
# **The trainer** reads the same tokens with the same weights, in float32, and computes
# its own log-probability of each: log π.

# %%
from three_policies.training.shapes import pad_rows

@torch.no_grad()
def both_sides(samples, temperature=1.0):
    """Return log μ as recorded, log π as recomputed, and which entries are tokens."""
    tokens, mask = pad_rows([s.tokens for s in samples], "right")
    log_mu, _ = pad_rows([s.rollout_log_prob for s in samples], "right")
    questions = torch.tensor(prompts)
    logits = model(torch.cat([questions, tokens], 1)).logits[:, questions.shape[1] - 1:-1]
    log_pi = (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return log_mu, log_pi, mask.bool()

# %%
SAMPLERS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None),
            "bfloat16, 4-bit weights": ("bfloat16", 4)}
samples = {name: answers(*how) for name, how in SAMPLERS.items()}
sides = {name: both_sides(x) for name, x in samples.items()}
print("mean of |log π − log μ| over the tokens")
for name, (log_mu, log_pi, mask) in sides.items():
    print(f"{name:24} {(log_pi - log_mu)[mask].abs().mean():.1e}")

# %% [markdown]
# They do not agree. In float32 the two add the same numbers in another order, so only the
# last digits differ. In bfloat16 the difference is visible, and with 4-bit weights the
# sampler is another policy.
#
# The policy that samples is called **π_rollout**, or μ for short. What the trainer
# computes is **π_old**.

# %% [markdown]
# ## 2. What does the difference look like?
#
# Each dot is a token, and on the diagonal both sides agree. Where do you expect the dots?

# %%
def show(figure):
    file = io.BytesIO()
    figure.savefig(file, dpi=80)
    display(Image(file.getvalue()))

figure = Figure(figsize=(8, 3.8), layout="constrained")
for axis, name in zip(figure.subplots(1, 2), ("bfloat16", "bfloat16, 4-bit weights")):
    log_mu, log_pi, mask = sides[name]
    axis.axline((0, 0), slope=1, color="#999999", linewidth=0.8)
    axis.scatter(log_mu[mask], log_pi[mask], s=4, color="#0072B2", linewidths=0)
    axis.set(title=name, xlabel="log μ (sampler)", ylabel="log π (trainer)",
             xlim=(-7, 0.3), ylim=(-7, 0.3))
show(figure)

# %% [markdown]
# There are two clouds: digits of which the model is sure, and mistakes that it was
# taught. Dots far below the diagonal are tokens that the trainer finds much less likely
# than the sampler did.
#
# Why are hardly any as far above? A token is drawn **because** μ likes it. For ρ = π/μ
# this becomes a law: over samples of μ the mean of ρ is 1, if μ can draw whatever π can,
# and the mean of log ρ is at most 0.

# %%
for name, (log_mu, log_pi, mask) in sides.items():
    log_rho = (log_pi - log_mu)[mask]
    rho = log_rho.exp()
    error = (rho - 1).square().mean().div(len(rho)).sqrt()
    print(f"{name:24} mean ρ = {rho.mean():.4f} ± {error:.4f}   "
          f"mean log ρ = {log_rho.mean():+.6f}   largest ρ = {rho.max():.2f}")

# %% [markdown]
# ## 3. Is it a bug?
#
# The law answers much of this. If the mean of ρ is not 1, then π is not a distribution
# over what was sampled, and something is broken. The doctor tests that and more.
#
# We begin with our 4-bit sampler. The doctor sees the two columns of log-probs and
# nothing else.

# %%
from three_policies.doctor.dumps import response
from three_policies.doctor import examine

def dump(samples, log_pi):
    return [response(i, {"prompt_ids": prompt, "token_ids": s.tokens,
                         "rollout_log_probs": s.rollout_log_prob,
                         "train_log_probs": row[:len(s.tokens)].tolist()})
            for i, (prompt, s, row) in enumerate(zip(prompts, samples, log_pi), 1)]

rounded = samples["bfloat16, 4-bit weights"]
log_pi = both_sides(rounded)[1]
print(examine(dump(rounded, log_pi)))

# %% [markdown]
# π is a distribution, so importance weights can correct the difference. Two columns do
# not always show what causes it. Given the model as well, the doctor can try the causes
# that it knows, one after the other.

# %%
from three_policies.doctor.rescore import rescore

print(*rescore(path, [], dump(rounded, log_pi)[:64]).lines(), sep="\n")

# %% [markdown]
# It has found the cause: the sampler's weights are rounded to 4 bits.
#
# Now for a mistake that people really make. The trainer's log-probs are off by one token,
# here beside the bfloat16 sampler's. The loss stays finite. How would you notice?

# %%
slipped = both_sides(samples["bfloat16"])[1].roll(1, dims=1)
print(examine(dump(samples["bfloat16"], slipped)))

# %% [markdown]
# Now π is not a distribution, and the doctor names the reason. A mistake has to be
# repaired, because no importance weight makes up for it.
#
# From here on there is no mistake, only a difference between two policies.

# %% [markdown]
# ## 4. What does the gradient lose?
#
# To see it without noise, we take a policy so small that we can list all it can say. It
# has three tokens, of which token 0 ends a response, and a response has at most three of
# them. That makes fifteen responses y.

# %% tags=["exact"]
from three_policies.oracle import Policy, expectation, grad_J, rewards, scores

old = Policy(V=3, T=3, seed=0)                  # the trainer's policy, π_old
mu = old.perturbed(seed=1, size=0.5)            # the sampler's: noise on the logits
R = rewards(old)                                # a reward for each response
print("y      π_old      μ      R")
for y, m, p, q, r in zip(old.tokens, old.mask, old.probs(), mu.probs(), R):
    print(f"{' '.join(map(str, y[m].tolist())):5} {p:6.3f} {q:6.3f} {r.item():6.3f}")

# %% [markdown]
# The trainer wants ∇J, the gradient of the expected reward under its own policy. But it
# gets samples of μ, and averages R(y) ∇log π_old(y) over them.
#
# Over infinitely many samples that average is a sum over the fifteen rows, so we can
# compute it exactly.

# %% tags=["exact"]
def compare(name, gradient):
    error = (gradient - wanted).norm() / wanted.norm()
    print(f"{name:28} error {100 * error:5.1f} % of the length of ∇J")

wanted = grad_J(old, R)
each = R * scores(old).sum(1)                   # R(y) ∇log π_old(y) of every response
compare("samples of π_old", expectation(old, each))
compare("samples of μ", expectation(mu, each))

# %% [markdown] tags=["exact"]
# The mean gradient misses the right one by 74.3 % of its length.
#
# More samples do not help, because this is already the mean over all of them. Nor does
# PPO's clip: it holds the new policy near the old one, and knows nothing of μ.

# %% [markdown]
# ## 5. Three corrections
#
# Weight each sample by how much likelier the trainer finds it than the sampler did, by ρ
# = π_old/μ:
#
# * `decoupled_token_is` weights each token by its own ρ, at most 2.
# * `decoupled_seq_is` weights a response by the product of its ρ, at most 2.
# * `no limit` does the same without the 2.

# %% tags=["exact"]
from three_policies import RolloutCorrectionConfig, correct

PRESETS = {"disabled": RolloutCorrectionConfig(),
           "decoupled_token_is": RolloutCorrectionConfig.decoupled_token_is(),
           "decoupled_seq_is": RolloutCorrectionConfig.decoupled_seq_is(),
           "no limit": RolloutCorrectionConfig.decoupled_seq_is(threshold=float("inf"))}

def gradients(config):
    """Return the gradient that each of the fifteen responses gives."""
    weights, mask, _ = correct(old.log_probs(), mu.log_probs(), old.mask, config)
    weights = mask.double() if weights is None else weights
    return ((weights * R)[..., None] * scores(old)).sum(1)

# %% [markdown]
# Which of the three has the right mean? And why would anybody set a limit?
#
# The bias says how wrong the mean is. The noise is the standard deviation in a batch of
# 256 responses. Together they make the error that one step has to expect.

# %% tags=["exact"]
N = 256
print("% of the length of ∇J:   bias   noise   together")
for name, config in PRESETS.items():
    each = gradients(config)
    mean = expectation(mu, each)
    variance = expectation(mu, (each - mean).square().sum(-1))
    bias = (mean - wanted).norm() / wanted.norm()
    noise = (variance / N).sqrt() / wanted.norm()
    together = (bias**2 + noise**2).sqrt()
    print(f"{name:22} {100 * bias:6.1f} {100 * noise:7.1f} {100 * together:10.1f}")

# %% [markdown] tags=["exact"]
# Without a limit the mean is exact, so the bias is 0.0 %.
#
# A limit of 2 on the product leaves a bias of 22.0 %, but lowers the noise from 32.7 to
# 25.3 %. With three tokens neither wins: together it is 33.6 % with the limit and 32.7 %
# without.
#
# A token's own ρ corrects for the token, but not for what came before it or follows.

# %% [markdown]
# Responses of language models are much longer than three tokens. The more ratios are
# multiplied, the more their product varies, until a few samples carry all the weight.
#
# Suppose that the ratios are independent, and that the ρ of one token has the variance
# 0.02, which is a k3 of about 0.01. What share of very many samples is effectively left?

# %% tags=["exact"]
for tokens in (3, 9, 64, 256, 1024):
    print(f"{tokens:5} tokens: {1 / 1.02**tokens:7.2%} of the samples")

# %% [markdown] tags=["exact"]
# At 256 tokens one sample of 159 is left. A batch always reports at least one, so a small
# batch looks better than it is. That is why products have a limit, and why long responses
# often get token weights instead, in spite of their bias.

# %% [markdown]
# ## 6. Train with and without
#
# Now the tiny model of part 1 learns by reinforcement, in 60 steps of 512 answers. A
# right answer earns 1. The sampler's weights are rounded to 4 bits, and they are 4 steps
# old.
#
# We train three times, for about half a minute each, and change only the correction.
# Before you go on, guess: which run will end where?

# %%
from three_policies import trainer
from three_policies.training.files import read_metrics

SETTINGS = [*TASK, "rollout.engine=transformers", "rollout.prompts=64",
            "rollout.samples=8", "rollout.quantize=4", "rollout.staleness=4",
            "train.steps=60", "train.mini_batches=2", "train.lr=5e-4",
            "train.warmup_steps=5", "train.eval_every=5"]

def train(preset):
    said = io.StringIO()                        # the run's own report
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = trainer.main([*SETTINGS, f"correction.preset={preset}", f"run={preset}"])
    assert code == 0, said.getvalue()
    return read_metrics(Path("runs") / preset / "metrics.jsonl")

# %%
METHODS = {"disabled": "#D55E00", "decoupled_token_is": "#009E73",
           "decoupled_seq_is": "#0072B2"}
curves = {}
for preset in METHODS:
    curves[preset] = train(preset)
    measured = [x["eval/accuracy"] for x in curves[preset] if "eval/accuracy" in x]
    print(f"{preset:20} held-out accuracy: {measured[0]:.2f} → {measured[-1]:.2f}")

# %% [markdown]
# ## 7. Read the figure
#
# On the left is what was learned. On the right is how far apart π_old and μ are, measured
# by k3, an estimate of the KL divergence per token. Which came first, the fall or the
# distance?

# %%
figure = Figure(figsize=(8.5, 3.4), layout="constrained")
left, right = figure.subplots(1, 2)
for preset, color in METHODS.items():
    for axis, name in ((left, "eval/accuracy"), (right, "rollout_corr/k3_kl")):
        points = [(line["step"], line[name]) for line in curves[preset] if name in line]
        axis.plot(*zip(*points), color=color, label=preset)
left.set(title="held-out accuracy", xlabel="step", ylim=(0, 1))
right.set(title="distance between sampler and trainer (k3)", xlabel="step", yscale="log")
left.legend(frameon=False, fontsize=8)
show(figure)

# %% [markdown]
# In the first steps all runs improve, and in all of them the distance grows, because the
# policy moves while the sampler stays four steps behind.
#
# Without a correction it keeps growing, and the accuracy falls to about half, because
# nothing in the loss accounts for samples that are another policy's. With weights the
# distance stays smaller.

# %% [markdown]
# ## 8. Was it luck?
#
# Three runs are three anecdotes, and their seed, 3, was chosen because it shows the
# collapse so plainly. The study of chapter 11 ran the same setting with five seeds.

# %% tags=["exact"]
import csv

with (ROOT / "studies/nine/results.csv").open() as file:
    rows = [row for row in csv.DictReader(file) if row["regime"] == "int4_staleness_4"]
accuracy = {(x["method"], int(x["seed"])): float(x["final_accuracy"]) for x in rows}
print("final accuracy by seed        1    2    3    4    5     mean")
for name in ("naive", "decoupled_token_is", "decoupled_seq_is"):
    found = [accuracy[name, seed] for seed in range(1, 6)]
    print(f"{name:26}", *(f"{x:.2f}" for x in found), f"  {sum(found) / 5:.2f}")

# %% [markdown] tags=["exact"]
# Without a correction (`naive`) the mean is 0.39. With weights it is 0.64 and 0.78.
#
# Much depends on the seed: with seed 5 sequence weights ended at 0.54. So compare methods
# on several seeds, and declare the comparison before the runs.

# %% [markdown]
# ## 9. A real model, and a curve that breaks
#
# SmolLM2-135M is a pretrained model. It learns to add two numbers, while the weights of
# its sampler are rounded to 6 bits. Chapter 12 has the study: seven arms, ten seeds each.
#
# Nothing is trained from here on. These are its results, on questions that were not
# trained on. Which arm would you have warned of?

# %% tags=["exact"]
ARMS = {"matched": "#000000", "disabled": "#E69F00", "decoupled_token_is": "#0072B2",
        "bypass_ppo_clip": "#D55E00"}
with (ROOT / "studies/real-card/results.csv").open() as file:
    rows = [row for row in csv.DictReader(file) if row["regime"] == "coarse"]
real = {arm: [row for row in rows if row["method"] == arm] for arm in ARMS}

def average(arm, column):
    return sum(float(row[column]) for row in real[arm]) / len(real[arm])

print("means of ten seeds         k3   reward of the samples: first, last")
for arm in ARMS:
    print(f"{arm:20} {average(arm, 'k3'):8.2f} {average(arm, 'first_reward'):23.2f}"
          f" {average(arm, 'last_reward'):7.2f}")

# %%
figure = Figure(figsize=(6, 3.2), layout="constrained")
axis = figure.subplots()
for arm, color in ARMS.items():
    lines = [[float(row["first_accuracy"]), *map(float, row["curve"].split())]
             for row in real[arm]]
    for line in lines:
        axis.plot(range(0, 21, 5), line, color=color, linewidth=0.5, alpha=0.4)
    axis.plot(range(0, 21, 5), [sum(x) / len(x) for x in zip(*lines)], color=color,
              linewidth=2.5, label=arm)
axis.set(title="held-out accuracy of the policy", xlabel="step", ylim=(0.2, 0.9))
axis.legend(frameon=False, fontsize=8, ncols=2)
show(figure)

# %% [markdown] tags=["exact"]
# `bypass_ppo_clip` breaks: its samples earn 0.23 in the first step and 0.21 in the last
# ones, while without any correction they reach 0.54. `matched` does not round, and its
# k3 is 0.00.

# %% [markdown]
# ## 10. What is wrong?
#
# A user does not know that the weights are rounded. He has a **dump**: both log-probs of
# each token. This one is of the same model and the same 6 bits, with longer answers. He
# believes that both sides compute in bfloat16, without experts, and says so.
#
# On a command line: `three-policies doctor DUMP --precision bf16 --no-experts`.

# %% tags=["exact"]
import contextlib
import io
import textwrap

from three_policies.doctor.command import main as doctor

recorded = str(ROOT / "studies/sizes/int6.jsonl")
with contextlib.redirect_stdout(io.StringIO()) as said:
    status = doctor([recorded, "--precision", "bf16", "--no-experts"])
for line in said.getvalue().splitlines():
    print(textwrap.fill(line, 88, subsequent_indent="        "))
print("exit status:", status)

# %% [markdown]
# The mean of ρ is 1, so weights could correct this. But the gap is larger than bfloat16
# leaves, and the doctor asks whether the weights differ. They do: they are rounded.

# %% [markdown]
# ## 11. Remove what can be removed
#
# A repair costs nothing in every step that follows. Chapter 9 has the list. For this
# model, how long may an answer be before a mismatch has to be corrected? The rule of
# chapter 7 says: while k3 · T is below 0.05.

# %% tags=["exact"]
with (ROOT / "studies/sizes/results.csv").open() as file:
    k3 = {row["row"]: float(row["k3_exact"]) for row in csv.DictReader(file)}
print("sampler's weights       k3      tokens without a correction")
for name, row in {"6 bits": "int6", "8 bits": "int8", "bfloat16": "bf16",
                  "float16": "fp16"}.items():
    print(f"{name:17} {k3[row]:10.6f} {0.05 / k3[row]:17.0f}")

# %% [markdown]
# ## 12. Correct what is left
#
# | k3 · T | take |
# |---|---|
# | below 0.05 | no weights |
# | up to 0.35 | `decoupled_seq_is` |
# | above | a repair; until then `decoupled_seq_is` or `decoupled_token_is` |

# %% [markdown]
# The lines for your own framework, here verl's:
#
# On a command line: `three-policies translate decoupled_seq_is --to verl`.

# %% tags=["exact"]
from three_policies.interop.translate import main as translate

status = translate(["decoupled_seq_is", "--to", "verl"])

# %% [markdown]
# ## 13. The curve after
#
# The arm `matched` of part 9 is the repaired run, and `decoupled_token_is` the corrected
# one. Both rise where `bypass_ppo_clip` falls.
#
# The corrected one does not end above `disabled` here. Answers of four tokens are too
# short for a weight to pay.

# %% [markdown]
# ## Your turn
#
# * Set `rollout.staleness=0`, or `rollout.quantize=8`. How much of the collapse is left?
# * Take another preset, such as `bypass_ppo_clip`. Chapter 6 lists them all.
# * Give the doctor a dump of your own run: `three-policies doctor DUMP.jsonl`.
#
# The proofs are in `math/`, beginning with [chapter 1](1-three-policies.md).
