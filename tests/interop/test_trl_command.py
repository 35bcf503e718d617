"""The script and the command of interop/README.md train with TRL, word for word."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("trl_required")
def test_the_script_of_the_page_trains(tiny_model, tmp_path):
    """eq:decoupled-ppo: three steps, in each of which bfloat16 alone sets ρ apart from 1.

    bfloat16 rounds to 1 part in 256. Samples of another policy than the trainer's, as of a cache
    that gradient checkpointing dropped, have a KL above 1; with the model's own penalty it is 0.02.
    By its generation_config.json any token ends a response.
    """
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(
        {"eos_token_id": [*range(26)], "pad_token_id": 0, "repetition_penalty": 1.1, "top_p": 0.8,
         "top_k": 5, "do_sample": True}))
    page = (ROOT / "interop/README.md").read_text(encoding="utf-8")
    script, command = re.search(r"Save this as `train_trl.py`.*?```python\n(.*?)```.*?"
                                r"```bash\n(python train_trl.*?)\n```", page, re.DOTALL).groups()
    (tmp_path / "train_trl.py").write_text(script)
    python, name, model = shlex.split(command)
    assert python == "python" and "/" in model
    run = subprocess.run(
        [sys.executable, name, "model"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    for key, low, high in (("grad_norm", 0.1, 100), ("rollout_corr/k3_kl", 1e-8, 0.002),
                           ("rollout_corr/is_ratio_max", 1.0001, 1.5),
                           ("completions/mean_length", 4, 16)):
        found = [float(x) for x in re.findall(f"'{key}': '(.*?)'", run.stdout)]
        assert len(found) == 3 and all(low < x < high for x in found), (key, found)
