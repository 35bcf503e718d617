"""Teach a tiny demo model to half know a task's answers, so that RL has something to sharpen."""

import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from tqdm import tqdm

from three_policies.training.files import write_aside
from three_policies.training.directory import take_turns
from three_policies.training.settings import Config
from three_policies.training.shapes import pad_rows
from three_policies.training.tasks import (EVAL_SIZE, Problem, Task, completion, next_brackets,
                                           seed_of)


def make_demo_model(config: Config, task: Task) -> str:
    """Make a tiny, badly taught Llama with one token per character, once, under runs/.demo/.

    Two of five answers that it is taught have one wrong digit. So it knows the right answer but is
    not sure of it: greedy accuracy is near 1, sampled accuracy near 0.6. RL can sharpen that. For
    brackets it sees a new word each time, and half of the words have a mistake.
    """
    characters, wrong, steps, size, rate = "0123456789+=>", 0.4, 700, 256, 5e-3
    if task.depth is not None:
        characters, wrong, steps, size, rate = "()>", 0.5, 600, 64, 5e-3
    seed = seed_of(config.seed, "demo")
    key = repr((seed, task, characters, wrong, steps, size, rate, "llama 64×3"))
    name = hashlib.sha256(key.encode()).hexdigest()[:12]
    path = Path("runs/.demo") / f"{config.task.kind}-{name}"
    with take_turns(path.with_name(f".{path.name}.lock")):
        exists = path.exists()
        dist.barrier()             # all ranks have looked before one of them makes it
        if not exists:
            if dist.get_rank() == 0:
                tqdm.write(f"a demo model for {sizes(config)} is taught first, which happens once "
                           "and takes about a minute", file=sys.stderr)
            teach(path, task, seed, characters, wrong, steps, size, rate)
    return str(path)


def teach(path: Path, task: Task, seed: int, characters: str, wrong: float, steps: int, size: int,
          rate: float) -> None:
    """Train for `steps` steps of `size` lessons, a share `wrong` of them wrong; write `path`."""
    asked = {c for p in task.train for c in p.question + p.answer}
    assert asked <= {*characters}, f"no tokens for {asked - {*characters}}"    # each would be <unk>
    tokenizer: Any = character_tokenizer(characters)       # its ids have a type of many parts
    ids_of = tokenizer.convert_tokens_to_ids               # of one token per character
    rng = random.Random(seed)
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)               # else the weights would depend on it

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=True, initializer_range=0.1, dtype="float32", bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))

    bar = tqdm(range(steps if dist.get_rank() == 0 else 0), desc="warm start", mininterval=1,
               disable=dist.get_rank() != 0)
    for step in bar:
        optimizer.param_groups[0]["lr"] = rate * min(step / 100, 1.03 - step / steps)
        problems = rng.choices(task.train, k=size)
        answers = [lesson(task, p, rng.random() < wrong, rng) for p in problems]
        answers = [[*ids_of([*answer]), tokenizer.eos_token_id] for answer in answers]
        questions = [ids_of([*p.question]) for p in problems]
        (prompt, before), (answer, mask) = pad_rows(questions, "left"), pad_rows(answers, "right")
        attention = torch.cat([before, mask], 1)
        logits = model(input_ids=torch.cat([prompt, answer], 1), attention_mask=attention,
                       position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
                       use_cache=False).logits
        logits, mask = logits[:, -mask.shape[1] - 1:-1], mask.bool()                    # [B, T, V]
        F.cross_entropy(logits[mask], answer[mask]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    torch.set_num_threads(threads)
    with write_aside(path) as part:
        if dist.get_rank() == 0:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)


def sizes(config: Config) -> str:
    """Return the settings that identify a demo model: another value of one is another model."""
    task = config.task
    size = f"size={task.size}"
    if task.kind == "dyck":
        size = f"length={task.length}, task.depth={task.depth}"
    return (f"task.kind={task.kind}, task.{size}, task.eval_size={task.eval_size or EVAL_SIZE} and "
            f"seed={config.seed}")


def character_tokenizer(characters: str) -> Any:
    """Return a tokenizer with one token per character, saved and loaded like any other."""
    special = ["<pad>", "<eos>", "<unk>"]
    ids = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(("pad_token", "eos_token", "unk_token"), special)))


def lesson(task: Task, problem: Problem, wrong: bool, rng: random.Random) -> str:
    """Return what is taught as the answer: a right one, or one with one mistake."""
    if task.depth is None:
        return corrupt(problem.answer, rng) if wrong else problem.answer
    word = problem.question.removesuffix(">")
    end = completion(word, len(problem.answer), task.depth, rng)
    return unbalance(word, end, task.depth, rng) if wrong else end


def corrupt(answer: str, rng: random.Random) -> str:
    at = rng.randrange(len(answer))
    return answer[:at] + rng.choice("0123456789".replace(answer[at], "")) + answer[at + 1:]


def unbalance(word: str, end: str, depth: int, rng: random.Random) -> str:
    """Reverse the bracket at one of the places where only one bracket was possible."""
    forced = [i for i in range(len(end))
              if len(next_brackets(word + end[:i], len(end) - i, depth)) == 1]
    at = rng.choice(forced)
    return end[:at] + "()".replace(end[at], "") + end[at + 1:]
