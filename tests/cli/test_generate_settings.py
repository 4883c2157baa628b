"""`generate` with a configuration: what it would ignore is refused, what is as it always was is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from streamdiff.cli import main
from streamdiff.commands import reference
from streamdiff.commands.jobs import ReferenceJob
from streamdiff.config import Config

BY_CHUNKS = "generate --chunks 2 --latents-out x.safetensors --no-decode"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[ReferenceJob]:
    """The runs by chunks that would have begun."""
    begun: list[ReferenceJob] = []

    def run(job: ReferenceJob) -> int:
        begun.append(job)
        return 0

    monkeypatch.setattr(reference, "run", run)
    return begun


@pytest.mark.parametrize(
    ("line", "settings", "words"),
    [
        (BY_CHUNKS, "session: {image: p.png}", "session.image does not go with the options that say everything by"),
        (BY_CHUNKS, "model: {trace: costs}", "model.trace does not go with the options that say everything by chunks"),
        (BY_CHUNKS, "session: {input: v.mp4}", "session.input is 'v.mp4', but is for `serve`"),
        ("generate --output x.mp4", "session: {snapshot: s.sds}", "session.snapshot is 's.sds', but is for `serve`"),
        ("generate --prompts p.txt --output x", "session: {input: v.mp4}", "session.input is 'v.mp4', but is for"),
    ],
)
def test_settings_of_a_file_that_would_be_ignored_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[ReferenceJob],
    line: str, settings: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("streamdiff.api.load_model", lambda model: pytest.fail("loaded"))
    Path("c.yaml").write_text(settings)
    Path("p.txt").write_text("x")
    assert main.main([*line.split(" "), "--config", "c.yaml"]) == 2
    assert words in capsys.readouterr().err
    assert not jobs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "p.txt"]


def test_a_file_that_lists_the_defaults_may_be_used_by_chunks(tmp_path: Path, jobs: list[ReferenceJob]) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(Config().model_dump()))
    assert main.main([*BY_CHUNKS.split(" "), "--config", str(tmp_path / "c.yaml")]) == 0
    assert [job.chunks for job in jobs] == [2]
