"""The doctor's command: read a dump, or sample one, and print what is found in it.

    three-policies doctor DUMP.jsonl [--json] [--figure FILE.png]
    three-policies doctor DUMP DUMP … | LOG [--json]
    three-policies doctor [DUMP.jsonl] --model DIR [--older DIR …] [--engine vllm]
    three-policies doctor --watch RUN [--figure FILE.png] [--idle MINUTES]
"""

import argparse
import itertools
import json
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from three_policies.checks import UserError
from three_policies.doctor import Report, examine
from three_policies.doctor.dumps import Response, read
from three_policies.doctor.follow import follow
from three_policies.doctor.laws import Finding
from three_policies.doctor.logs import is_log
from three_policies.doctor.normal import PRECISIONS, Class, known, table
from three_policies.doctor.trend import of as trend_of
from three_policies.training.signals import show

if TYPE_CHECKING:
    from three_policies.doctor.rescore import Match, Rescored

RESCORED = 1024                 # most responses that the model scores


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if the pair is healthy, 1 for a fault, 2 for unreadable input.

    3 if the dump cannot tell.
    """
    given = arguments(argv)
    try:
        if given.watch:
            return follow(given.watch, show, given.figure, given.idle, class_of(given))
        if given.more or (given.dump and (is_log(given.dump) or Path(given.dump).is_dir())):
            return over_steps(given)
        report, rescored = consult(given)
        show(answer(report, rescored, given.json))
    except (OSError, ValueError, UserError) as error:
        print(f"doctor: {in_words(error)}", file=sys.stderr)
        return 2
    except Exception:                  # a bug: Python would exit with 1, which says a cause
        traceback.print_exc()
        return 2
    guilty = rescored is not None and rescored.guilty != "none"
    return 1 if guilty else report.exit_code


def options() -> argparse.ArgumentParser:
    """Return the parser; its help ends with the sizes of healthy pairs."""
    parser = argparse.ArgumentParser(
        prog="three-policies doctor", description="Find why two log-probs differ.", epilog="Is my "
        f"number normal?\n{table()}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", nargs="?", metavar="DUMP", help="JSON lines or parquet, a response "
                        "a row, or a debug file of slime or miles (.pt); without DUMP the engine "
                        "samples from --model. Or a run's log: what the gap grows with")
    parser.add_argument("more", nargs="*", metavar="DUMP", help="dumps of later steps: what the gap"
                        " grows with")
    parser.add_argument("--watch", metavar="RUN", help="a run of this trainer, or a file or folder "
                        "of dumps that grows: a line a step, until Ctrl-C or the run's end; with "
                        "--figure a picture whenever the verdict changes")
    parser.add_argument("--idle", type=float, metavar="MINUTES", help="end --watch after so long "
                        "without news; 0: say what is there, and end")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--figure", metavar="FILE.png", help="draw the dump above known causes")
    parser.add_argument("--model", metavar="DIR", help="the trainer's model at the dump's step, in "
                        "Hugging Face's format: it rescores the dump")
    parser.add_argument("--older", metavar="DIR", nargs="+", default=[],
                        help="its older weights, in the same format, newest first")
    parser.add_argument("--engine", default="auto", metavar="NAME",
                        help="what samples if there is no DUMP: auto, vllm or transformers")
    parser.add_argument("--precision", metavar="P", help="the coarser one of both sides: fp32, "
                        "fp16, bf16, fp8 …")
    parser.add_argument("--experts", action=argparse.BooleanOptionalAction, default=None,
                        help="whether the model is a mixture of experts")
    parser.add_argument("--config", metavar="FILE", help="the model's config.json, which says both")
    return parser


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line gives; what does not go together is an error."""
    parser = options()
    given = parser.parse_args(argv)
    if given.precision and not known(given.precision):
        parser.error(f"--precision {given.precision} is none of {', '.join(PRECISIONS)}")

    if given.watch and (given.dump or given.model or given.json):
        parser.error("--watch goes with --figure, --idle and what is known of the pair alone")
    if given.idle is not None and not (given.watch and given.idle >= 0):
        parser.error("--idle MINUTES goes with --watch, and is 0 or more")
    if not (given.watch or given.dump or given.model):
        parser.error("give a DUMP, --model DIR, or both, or --watch RUN")
    if given.older and not given.model:
        parser.error("--older needs --model, the newest of them")
    if given.figure and not Path(given.figure).parent.is_dir():
        parser.error(f"--figure {given.figure} is in no directory that is there")
    if given.figure and not given.figure.lower().endswith((".png", ".jpg", ".webp", ".pdf")):
        parser.error(f"--figure must end in .png, .jpg, .webp or .pdf, not {given.figure!r}")
    return given


def over_steps(given: argparse.Namespace) -> int:
    """Say what the gap grows with, from a log or several dumps; return the command's exit code."""
    if given.model or given.figure:
        raise UserError("--model and --figure go with one DUMP, not with a log or several")
    trend = trend_of([given.dump, *given.more], class_of(given))
    show(json.dumps(trend.as_json(), ensure_ascii=False) if given.json else str(trend))
    return trend.exit_code


def answer(report: Report, rescored: "Rescored | None", as_json: bool) -> str:
    """Return what the command prints: lines of text, or one line of JSON."""
    if not as_json:
        return "\n".join([str(report), *(rescored.lines() if rescored else [])])
    model = {"model": rescored.as_json()} if rescored else {}
    return json.dumps(report.as_json() | model, ensure_ascii=False)


def in_words(error: Exception) -> str:
    """Return one sentence for input that cannot be read."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be read: {error.strerror}"
    return str(error)


def consult(given: argparse.Namespace) -> "tuple[Report, Rescored | None]":
    """Return the report, and with a model also what the rescored columns are."""
    responses, rescored = read(given.dump) if given.dump else iter(()), None
    if given.model:
        rescored, few = rescore_few(given, responses)
        responses = itertools.chain(few, responses)

    report = examine(responses, class_of(given))
    if not report.tokens and not report.lost.tokens:
        raise ValueError("the dump has no token that counts")
    if rescored:
        report = report._replace(causes=explained(rescored, report.causes),
                                 rescored=rescored.guilty == "none")
    if given.figure and report.tokens:
        from three_policies.doctor.panels import save
        save(report.examined, given.figure)
    return report, rescored


def class_of(given: argparse.Namespace) -> Class:
    """Return what the command line states of the pair, and what the model's config.json does."""
    path = given.config or (Path(given.model) / "config.json" if given.model else None)
    stated = Class.of(given.precision, experts=given.experts)
    if path is not None and (given.config or Path(path).is_file()):
        # The files' precision is not that of the sides unless it is said to be.
        of = Class.of_config(path)
        stated = stated.over(of if given.config else Class(None, of.experts))
    return stated


def rescore_few(given: argparse.Namespace, responses: Iterator[Response]
                ) -> "tuple[Rescored, list[Response]]":
    """Rescore the dump's first responses, or without a dump those that the engine samples."""
    # Imported here: a dump alone needs no transformers.
    from transformers.utils import logging

    from three_policies.doctor.rescore import random_prompts, rescore, sample_and_score
    from three_policies.training.models import require_place
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    for key, path in zip(["--model ", *["--older "] * len(given.older)],
                         [given.model, *given.older]):
        require_place(path, key)
    few = list(itertools.islice(responses, RESCORED)) if given.dump else sample_and_score(
        given.model, given.engine, random_prompts(given.model))
    refuse_images(given.model, few)
    return rescore(given.model, given.older, few), few


def refuse_images(model: str, responses: list[Response]) -> None:
    """Raise ValueError if a prompt has a token that stands for what no dump holds, as an image."""
    settings = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    stand_ins = {value for key, value in settings.items() if re.fullmatch(
        "(image|video|audio)_token_(id|index)", key)}
    for r in responses:
        if found := stand_ins & {*(r.prompt_ids or ()), *r.token_ids}:
            raise ValueError(
                f"line {r.line} has an image, a video or a sound (token {min(found)}), which no "
                "dump holds, and --model scores text alone; without --model the dump is examined")


def explained(rescored: "Rescored", suggested: list[Finding]) -> list[Finding]:
    """Return the model's findings on the faulty columns, or what the dump's are still worth.

    If a column is unknown, or it is unknown which one is at fault, they stay. If both columns are
    the model's, those stay that rest on a law, such as that of a record which is not of what was
    drawn: the noise that the model measures refutes only what was suggested by a gap's size. If
    both depart from the model alike, it may be the wrong model: nothing is certain then.
    """
    columns = {"log μ": rescored.rollout, "log π": rescored.train}
    if rescored.guilty == "unknown" or any(m.cause == "unknown" for m in columns.values()):
        return suggested
    if rescored.guilty == "none":
        return [finding for finding in suggested if finding.confidence != "suggested"]

    alike = are_alike(rescored.rollout, rescored.train)
    doubt = "; so is the other column, roughly: is --model the model of this run?" if alike else ""
    return [Finding(match.cause, max(match.left, 0.3) if alike else match.left,
                    f"{name} is {match.name}: {match.left:.1%} of the gap left (next: "
                    f"{match.next[0]}, {match.next[1]:.1%}){doubt}" + f"; {match.grid}" * bool(
                        match.grid))
            for name, match in columns.items() if match.cause]


def are_alike(one: "Match", other: "Match") -> bool:
    """True if both columns depart from the model by one fault of about one size."""
    near = one.parameter == other.parameter or (
        isinstance(one.parameter, float) and isinstance(other.parameter, float)
        and 0.8 * other.parameter < one.parameter < 1.25 * other.parameter)
    return one.row == other.row and one.cause == other.cause and near
