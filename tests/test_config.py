"""A configuration is read whole or refused with words that help."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.config import RENAMED, Config, ServeConfig
from streamdiff.config_file import load
from streamdiff.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def write(tmp_path: Path) -> object:
    def write(text: str) -> Path:
        path = tmp_path / "x.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value)


def test_without_a_file_the_defaults_hold() -> None:
    assert load(None) == Config()
    assert Config().serve.host == "127.0.0.1"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_of_the_repository_loads(path: Path) -> None:
    assert isinstance(load(path), Config)
    assert path.read_text(encoding="utf-8").startswith("#"), "say what it is for"


def test_a_network_gets_in_with_a_token_and_no_less_room_than_by_default() -> None:
    serve = load(CONFIGS[[path.name for path in CONFIGS].index("lan.yaml")]).serve
    assert serve.control_token_file and not serve.insecure and serve.max_viewers >= Config().serve.max_viewers


def test_cpu_tiny_spells_out_the_defaults() -> None:
    spelled = load(CONFIGS[[path.name for path in CONFIGS].index("cpu_tiny.yaml")])
    assert spelled == Config(model=Config().model.model_copy(update={"device": "cpu"}))


@pytest.mark.parametrize(("scale", "pictures"), [(1, "auto"), (2, "rgb")])
def test_pictures_that_are_enlarged_come_as_rgb(scale: int, pictures: str) -> None:
    """And so a GPU hands out YUV420 where nothing is enlarged."""
    assert Config(serve=ServeConfig(upscale=scale)).served_model().pictures == pictures


@pytest.mark.parametrize("text", ["", "# nothing\n", "model:\n  # all commented out\n"])
def test_an_empty_file_or_section_means_the_defaults(write, text: str) -> None:
    assert load(write(text)) == Config()


def test_values_of_the_file_and_overrides_over_them(write) -> None:
    path = write("playback: {fps: 30}\nserve: {port: 9000, codec: vp8}")
    config = load(path, {"serve.port": 1234, "session.seed": 5})
    assert (config.playback.fps, config.serve.codec, config.serve.port, config.session.seed) == (30, "vp8", 1234, 5)
    assert config.model == Config().model


@pytest.mark.parametrize("text", ["a: \x00", "serve: {port: 1, port: 2}", f"session: {{prompt: {'x' * 2001}}}"])
def test_a_bad_file_is_refused_by_name_in_few_words(write, text: str) -> None:
    """What is said to other mistakes is in tests/messages.txt."""
    path = write(text)
    message = refusal(path)
    assert "x.yaml" in message and len(message) - len(str(path)) < 400


@pytest.mark.parametrize(("old", "new"), [names for names in RENAMED.items() if "." in names[0]])
def test_an_old_name_is_refused_with_the_new_one(write, old: str, new: str) -> None:
    section, name = old.split(".")
    assert f"{old} is called {new} now" in refusal(write(f"{section}: {{{name}: 1}}"))
    other, field = new.split(".")
    assert field in dict(Config().model_dump())[other], "which there is"


@pytest.mark.parametrize(
    ("key", "old", "new"), [("kv_context", "matched", "same_step"), ("decode_rank", "own-rank", "dedicated")]
)
def test_an_old_value_is_refused_with_the_new_one(write, key: str, old: str, new: str) -> None:
    assert f"is {old!r}, which is called {new} now" in refusal(write(f"model: {{{key}: {old}}}"))
    load(write(f"model: {{{key}: {new}}}"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "directory" in refusal(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00binary")
    assert "UTF-8" in refusal(tmp_path / "bytes.yaml")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(
    tree=st.dictionaries(
        st.sampled_from(list(Config.model_fields)) | st.text(max_size=8),
        values | st.dictionaries(st.sampled_from(["fps", "port", "seed", "name", "steps", "bitrate"]), values),
        max_size=4,
    )
)
def test_anything_is_either_loaded_or_refused(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    path = tmp_path_factory.mktemp("any") / "x.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    try:
        config = load(path)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(config, Config)


@pytest.mark.parametrize("text", ["a.example", "https://a.example/path", "ftp://a.example", ""])
def test_an_origin_is_what_a_browser_sends(write, text: str) -> None:
    message = refusal(write(f"serve:\n  cors_origins: ['https://a.example:8443', '{text}']"))
    assert "cors_origins.1" in message and "https://example.org" in message
    assert load(write("serve:\n  cors_origins: ['*', 'https://a.example:8443']")).serve.cors_origins[1:]


@pytest.mark.parametrize(
    "serve", [{"handover": "a", "state_dir": "a"}, {"tls_cert": "cert.pem"}, {"udp_ports": "60000-70000"}]
)
def test_settings_that_do_not_go_together_are_refused(write, serve: dict[str, str]) -> None:
    assert "serve: " in refusal(write(yaml.safe_dump({"serve": serve})))
