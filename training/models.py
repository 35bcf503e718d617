"""A model is complete, or it is refused by name: its place, its weights, its tokenizer.

This file decides: a model that would be filled in at random, or would fail in the middle of a run,
is refused with one sentence before training. Nothing is drawn at random while a policy is scored.
"""

import hashlib
import json
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file

from three_policies.checks import UserError
from three_policies.training.fetch import MODELS
from three_policies.training.packing import Packing, attend_in_rows
from three_policies.training.settings import PolicyConfig


def require_place(path: str, key: str = "policy.path=") -> None:
    """Refuse a path that is neither a directory with a model nor one that the hub has."""
    place = Path(path)
    if (place / "adapter_config.json").is_file():
        raise UserError(f"{key}{path} is a LoRA, not a model: train the model that it belongs "
                        "to, or what policy.lora_save_merged=true wrote")
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise UserError(f"{key}{path} is no model: it has no config.json")
    elif path in MODELS:
        raise UserError(f"{key}{path} is no directory here; three-policies fetch {path} writes it")
    elif not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path, re.ASCII):
        raise UserError(f"{key}{path} is no directory, and no name on the hub, such as "
                        "Qwen/Qwen2.5-0.5B-Instruct")
    elif not isinstance(try_to_load_from_cache(path, "config.json"), str):
        try:
            get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=10)
        except Exception as error:         # the hub's own, and those of the library below it
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"{key}{path} is no directory here, and the hub did not "
                            f"return it: {type(error).__name__}, {reason}") from None


def configuration(path: str) -> tuple[Any, dict[str, float]]:
    """Return the model's config.json with dropout set to 0, and what was turned off, by name.

    With dropout, or a router's jitter, π_old and π_θ would differ at equal weights. A model that
    caps its attention scores, such as Gemma 2, attends without SDPA, which would leave the cap out.
    """
    load = partial(transformers.AutoConfig.from_pretrained, path, trust_remote_code=False)
    config = load()
    drawn = {key: x for key, x in config.to_dict().items()
             if re.search("drop|jitter", key) and type(x) in (int, float) and x > 0}
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    attention = {"attn_implementation": "eager"} if capped else {}
    changed = {**dict.fromkeys(drawn, 0.0), **attention}
    return load(**changed) if changed else config, drawn


def digest_of(path: str) -> str:
    """Return a SHA-256 of config.json, tokenizer.json, and three MB of each weight file."""
    cached = None if Path(path).is_dir() else try_to_load_from_cache(path, "config.json")
    place, digest = Path(cached).parent if isinstance(cached, str) else Path(path), hashlib.sha256()
    for file in [*place.glob("config.json"), *place.glob("tokenizer.json")]:
        whole = json.loads(file.read_text("utf-8"))
        whole.pop("transformers_version", None)            # another writes the same otherwise
        digest.update(json.dumps(whole, sort_keys=True).encode())
    for file in sorted(place.glob("model*.safetensors")):
        size, mb = file.stat().st_size, 2 ** 20
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for at in (0, size // 2, max(0, size - mb)):
                opened.seek(at)
                digest.update(opened.read(mb))
    return digest.hexdigest()


def read_model(path: str) -> Any:
    """Return the model in float32; raise ValueError with the names of weights that are wrong."""
    config, _ = configuration(path)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        output_loading_info=True, ignore_mismatched_sizes=True)             # they are refused below
    model, found = loaded
    shapes = {name: f"{name} {list(given)} instead of {list(right)}"
              for name, given, right in found["mismatched_keys"]}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    untied = config.get_text_config().tie_word_embeddings and head.weight is not table.weight
    filled = shapes.keys() | found["missing_keys"]                          # at random
    faults = {"are missing": found["missing_keys"], "have another shape": shapes.values(),
              "are unknown to this architecture": found["unexpected_keys"],
              "are not finite": [name for name, x in model.state_dict().items()
                                 if name not in filled and not x.isfinite().all()],
              "differ from the embeddings that config.json ties them to": ["lm_head"] * untied}
    if any(faults.values()):
        raise ValueError("; ".join(f"weights {fault}: {some(sorted(names))}"
                                   for fault, names in faults.items() if names))
    return model


def add_lora(model: Any, policy: PolicyConfig, seed: int) -> Any:
    """Freeze a model, add peft's LoRA, W + (α/r) B A with B = 0 at first, and return the model.

    Without policy.lora_rank nothing is added.
    """
    if policy.lora_rank is None:
        return model
    from peft import LoraConfig            # takes a second, and few runs need it
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    from transformers.pytorch_utils import Conv1D

    targets: Any = policy.lora_targets
    layers = [name for name, module in model.named_modules()
              if isinstance(module, (torch.nn.Linear, Conv1D))
              and module is not model.get_output_embeddings()]
    linear, attention = (", ".join(sorted({name.split(".")[-1] for name in names})) for names in (
        layers, [name for name in layers if "attn" in name or "attention" in name]))
    if targets is None and model.config.model_type not in (
            TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING):
        raise UserError(f"peft has no layers of its own for {model.config.model_type}: set "
                        f"policy.lora_targets to some of {linear}")
    if targets not in (None, "all-linear"):
        targets = [name.strip() for name in targets.split(",")]
        places = [f".{place}" for place, _ in model.named_modules()]
        if unknown := [t for t in targets if not any(p.endswith(f".{t}") for p in places)]:
            raise UserError(f"policy.lora_targets has {', '.join(unknown)}, which this model "
                            f"does not have; its linear layers are {linear}")

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)                            # of A
            model.add_adapter(LoraConfig(
                r=policy.lora_rank, lora_alpha=policy.lora_alpha, task_type="CAUSAL_LM",
                target_modules=targets))
    except ValueError as error:
        raise UserError(f"no LoRA with policy.lora_rank={policy.lora_rank} and "
                        f"policy.lora_targets={policy.lora_targets}: {error}") from None

    if any(isinstance(x, BaseTunerLayer)
           for x in (model.get_output_embeddings(), model.get_input_embeddings())):
        raise UserError(f"policy.lora_targets={policy.lora_targets} must leave out embeddings and "
                        "head, whose products are not peft's here")
    odd = {name.split(".base_layer.")[0].split(".")[-1] for name, _ in model.named_parameters()
           if ".base_layer." in name and not name.endswith((".weight", ".bias"))}
    if odd:
        raise UserError(f"policy.lora_targets={policy.lora_targets} reaches "
                        f"{', '.join(sorted(odd))}, whose packed weights no engine here can merge: "
                        f"set policy.lora_targets to layers of attention ({attention})")
    return model


def some(names: list[str]) -> str:
    """Join the first five names, and say how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def empty_model(path: str) -> Any:
    """Return the model that `read_model` returns, without weights and their memory."""
    config, _ = configuration(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    except OSError:
        pass                               # not every model has one
    return model


def build_sdpa_mask(*args: Any, attention_mask: Tensor | None = None,
                    allow_is_causal_skip: bool = True, **settings: Any) -> Tensor | None:
    """Build transformers' mask for SDPA, or none where there is no attention mask.

    transformers' own function may leave out more masks, but for that it looks at the mask on the
    device, and so makes the host wait.
    """
    return sdpa_mask(*args, attention_mask=attention_mask, **settings,
                     allow_is_causal_skip=allow_is_causal_skip and attention_mask is None)


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any,
           packing: Packing | None = None, **settings: Any) -> Any:
    """Attend as transformers' SDPA does, but by batched products where these are quicker.

    With a `packing` no mask is looked at: each of its rows attends to itself.

    On several threads of a CPU torch's fused kernel starts a team of threads for every product of
    matrices (MKL's, seen by a debugger). For a few queries that takes longer than the products: on
    two threads of an AMD EPYC a step of the demo took 0.32 s, and takes 0.24 with batched products
    (`python tools/bench.py step`). These keep all scores, so longer responses get the fused kernel.
    """
    if packing is not None:
        return attend_in_rows(query, key, value, packing, settings.get("scaling")), None
    small = 1 < query.shape[2] and query.shape[2] * key.shape[2] <= 2048
    batched = query.is_cpu and torch.get_num_threads() > 1 and small
    with sdpa_kernel(SDPBackend.MATH) if batched else nullcontext():
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **settings)


def use_attention(model: transformers.PreTrainedModel) -> None:
    """Let a model that attends by SDPA do so by `attend`, with masks of `build_sdpa_mask`."""
    if model.config._attn_implementation == "sdpa":
        transformers.AttentionMaskInterface.register("sdpa_unseen", build_sdpa_mask)
        transformers.AttentionInterface.register("sdpa_unseen", attend)
        model.set_attn_implementation("sdpa_unseen")


# A text on which tokenizers' rules of splitting and joining differ.
PROBE = ("What is 12 plus 345, or 1234567? a  b\tc\n\nfoo\r\n\n  x DON'T don't x_y=z; (1.5e-3) "
         "\u00e9 e\u0301 \u4f60\u597d \u03a9 \U0001f600 # end \n ")


def read_tokenizer(path: str) -> tuple[Any, list[str]]:
    """Return the model's tokenizer, and a sentence if others would read it otherwise.

    Refuse the empty one that some classes make of no files.
    """
    missing = ValueError("it has no tokenizer: tokenizer.json, which save_pretrained of its "
                         "tokenizer writes, is not there")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:             # of as many types as there are tokenizers
        if Path(path).is_dir() and not [*Path(path).glob("*token*"), *Path(path).glob("vocab*")]:
            raise missing from None
        raise error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise missing
    if cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is None:
        return tokenizer, []
    # For some models, such as Qwen2, transformers takes a class of its own and the vocabulary alone
    # of tokenizer.json, whatever that says of how a text is split and ids are joined.
    written = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    one, other = (x(PROBE, add_special_tokens=False).input_ids for x in (tokenizer, written))
    if one == other and tokenizer.decode(one) == written.decode(one):
        return tokenizer, []
    written.eos_token = written.eos_token or tokenizer.eos_token
    return written, ["policy.path: AutoTokenizer reads a text otherwise than tokenizer.json says, "
                     "which is followed here; read model/ with PreTrainedTokenizerFast, too"]


def require_vocabulary(tokenizer: Any, vocabulary: int, ids: set[int]) -> list[str]:
    """Refuse a model without a row for each of the `ids` that a run will give it.

    Return a sentence if the tokenizer has further tokens, which the run does not use.
    """
    if unknown := sorted(i for i in ids if i >= vocabulary):
        raise ValueError(f"its vocabulary has {vocabulary} tokens, and its tokenizer makes number "
                         f"{unknown[0]} of {tokenizer.convert_ids_to_tokens(unknown[0])!r}: the "
                         "tokenizer is another model's")
    largest = max(tokenizer.get_vocab().values())
    if largest < vocabulary:
        return []
    return [f"policy.path: the tokenizer's last token is number {largest}, the model has rows for "
            f"{vocabulary} tokens; no question has one of those beyond"]
