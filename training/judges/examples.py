"""Do the prompts that the page and the README offer look right, whatever the seed, and still after a minute?

    python -m training.judges.examples                       # all of them: an hour on a CPU
    python -m training.judges.examples "a red heart" --minute-seeds 0    # one prompt, soon after its start: a minute

Every look is two chunks (0.6 s), which `world_judge` reads; training/README.md says what is right.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import report
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.tiny.prompts import EXAMPLES, read, scene_of
from training.judges.tiny_figures import TOGETHER
from training.judges.tiny_quality import RUN_UP, Subject, decode, load_subject
from training.judges.world_judge import judge, mistake

SUMMARY = "Judge the prompts that the page and the README offer, over many seeds."
SOON, MINUTE = 3, 200
"""Chunks that are judged, counted from 0, each with the one before it: 1 s and 60 s after the start."""
MOST_WRONG = 1 / 40
"""Share of seeds that may look wrong."""


def shipped() -> list[str]:
    """The page's examples and the prompts of the README's commands and code, each once."""
    readme = (report.ROOT / "README.md").read_text(encoding="utf-8")
    said = re.findall(r'(?:--prompt |open\(|set_prompt\()"([^"]+)"', readme)
    return list(dict.fromkeys([*EXAMPLES, *said]))


def looks(subject: Subject, prompt: str, mark: int, seeds: int) -> list[str]:
    """What is wrong, in words, of one look at `mark` for each seed from 0 on; none where all are right."""
    text = read(prompt, None).text
    scene, chunks = scene_of(text), range(max(0, mark + 1 - TOGETHER - RUN_UP), mark + 1)
    latents = subject.rollout([text] * seeds, chunks=mark + 1, steps=4, kv_context="clean", seed=0, keep=set(chunks))
    wrong = []
    for seed, frames in enumerate(decode(subject, latents, chunks)[:, -TOGETHER:].flatten(1, 2)):
        verdict = judge(frames)
        right = verdict.right(scene)
        if not all(right.values()):
            wrong.append(f"seed {seed}: {mistake(verdict, right, text)}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.judges.examples", description=SUMMARY)
    parser.add_argument("prompts", nargs="*", help="what to judge (default: the page's examples and the README's)")
    parser.add_argument("--seeds", type=int, default=40, help="streams judged after a second")
    parser.add_argument("--minute-seeds", type=int, default=8, help="streams judged after a minute")
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: training/results/examples.json, none for other prompts)"
    )
    options = parser.parse_args(argv)
    out = options.out or (None if options.prompts else report.ROOT / "training" / "results" / "examples.json")
    head = report.header(warm_up="none: nothing here is timed")
    subject = load_subject(EMBEDDED_WEIGHTS, torch.device("cpu"))
    results: dict[str, dict[str, report.Json]] = {}
    for prompt in options.prompts or shipped():
        results[prompt] = {}
    for name, mark, seeds in (("second", SOON, options.seeds), ("minute", MINUTE, options.minute_seeds)):
        for prompt, found in results.items():
            if not seeds:
                continue
            wrong = looks(subject, prompt, mark, seeds)
            found[name] = {"seeds": seeds, "right": seeds - len(wrong), "wrong": wrong}
            met = len(wrong) <= MOST_WRONG * seeds
            print(
                f"{'met   ' if met else 'MISSED'} {name}: {seeds - len(wrong)} of {seeds}  {prompt}",
                *wrong,
                sep="\n    ",
                flush=True,
            )
            if out:
                report.write_json(out, head, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
