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


def refusal(path: Path | None, overrides: dict[str, object] | None = None, names: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, names)
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serve: {prot: 1}", ["serve.prot", "did you mean serve.port?"]),
        ("playbak: {fps: 3}", ["playbak", "did you mean playback?"]),
        ("fps: 30", ["fps", "did you mean playback.fps?"]),
        ("serve: {fps: 30}", ["serve.fps", "did you mean playback.fps?"]),
        ("serve: {qqqq: 1}", ["serve.qqqq", "known here: host, port"]),
        ("playback: {fps: 500}", ["playback.fps", "500", "less than or equal to 120"]),
        ("playback: {fps: '40'}", ["playback.fps", "'40'", "a valid number"]),
        ("playback: {max_ahead_s: 0}", ["playback.max_ahead_s", "greater than 0"]),
        ("playback: 40", ["playback is 40", "a section with keys"]),
        ("serve: {codec: av1}", ["serve.codec", "'av1'", "'auto', 'h264' or 'vp8'"]),
        ("serve: {port: true}", ["serve.port", "true", "a valid integer"]),
        ("serve: {open_browser: 'no'}", ["serve.open_browser", "'no'", "a valid boolean"]),
        ("model: {steps: 0}", ["model.steps", "0", "1"]),
        ("batching: {rules: [{max_rows: 2}]}", ["batching: rules lower max_rows, which is 1"]),
        ("batching: {max_rows: 4, rules: 3}", ["batching.rules is 3"]),
        (
            "batching: {max_rows: 4, rules: [{rows: 3}]}",
            ["batching.rules.0.rows", "did you mean batching.rules.0.max_rows?"],
        ),
        ("batching: {max_rows: 4, rules: [{max_rows: 0}]}", ["batching.rules.0.max_rows is 0", "1"]),
        ("model: {steps: four}", ["model.steps", "'four'", "a whole number from 1 to 50, or a list of timesteps"]),
        ("model: {steps: [1000, x]}", ["model.steps is a list"]),
        ("session: {prompt: ''}", ["session.prompt", "at least 1 character"]),
        (f"session: {{prompt: {'x' * 2001}}}", ["session.prompt", "2,001 characters", "2000"]),
        ("- 1\n- 2", ["must hold sections"]),
        ("serve:\n  port: 1\n  port: 2", ["line 3", "'port' is given twice"]),
        ("a: [1,\nb: }", ["line 2", "not valid YAML"]),
        ("a: \x00", ["not valid YAML"]),
        ("a: !!python/object/apply:os.system ['true']", ["line 1", "not valid YAML"]),
    ],
)
def test_a_bad_file_is_refused_with_the_place_the_value_and_the_way_out(write, text: str, words: list[str]) -> None:
    path = write(text)
    message = refusal(path)
    for word in ["x.yaml", *words]:
        assert word in message
    assert len(message) - len(str(path)) < 400


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


def test_all_problems_are_told_at_once(write) -> None:
    message = refusal(write("serve: {prot: 1, codec: av1}\nsession: {seed: -1}"))
    assert len(message.splitlines()) == 3


def test_a_bad_override_is_named_as_it_was_typed(write) -> None:
    message = refusal(write("playback: {fps: 30}"), {"playback.fps": 500.0}, {"playback.fps": "--fps"})
    assert message.startswith("--fps is 500.0, but must be")
    assert "x.yaml" not in message


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ice_servers: [{url: 'http://example.org'}]", r"http://example.org.*stun:HOST\[:PORT\]"),
        ("ice_servers: [{url: 'turn:example.org:3478'}]", "a TURN server has username and credential"),
        ("ice_servers: [{url: 'stun:example.org:3478', nme: ann}]", "nme is no known key.*url, username, credential"),
        ("cors_origins: ['*', 'https://a.example/path']", "cors_origins.1.*such as https://example.org"),
        ("hosts: ['https://stream.example.org']", "hosts.0.*such as stream.example.org, without a port"),
        ("hosts: ['stream.example.org:443']", "hosts.0.*such as stream.example.org, without a port"),
        ("trusted_proxies: [10.0.0.1/8]", "trusted_proxies.0.*10.0.0.1/8.*an address or a network such as 10.0.0.5"),
        ("outputs: show.mp4", "'show.mp4', but must be a valid list"),
    ],
)
def test_wrong_servers_and_outputs_are_explained(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"serve:\n  {text}\n")
    with pytest.raises(ConfigError, match=words):
        load(file)


@pytest.mark.parametrize(
    "serve", [{"handover": "a", "state_dir": "a"}, {"tls_cert": "cert.pem"}, {"udp_ports": "60000-70000"}]
)
def test_settings_that_do_not_go_together_are_refused(write, serve: dict[str, str]) -> None:
    assert "serve: " in refusal(write(yaml.safe_dump({"serve": serve})))
