from collections.abc import Sequence

import pytest

from weightd.core.errors import ConfigError
from weightd.daemon.cli import app as cli


def test_every_command_is_a_function_of_its_own_name() -> None:
    names = [command.__name__ for command in cli.COMMANDS]

    assert "plan" in names
    assert len(set(names)) == len(names)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])

    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert all(command.__name__.replace("_", "-") in printed for command in cli.COMMANDS)


def test_deliberate_error_of_a_command_ends_with_its_text_and_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: Sequence[str] | None, prog_name: str) -> None:
        raise ConfigError("bulk.port", "-1", "no port")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as left:
        cli.main(["serve"])

    assert left.value.code == 78
    assert capsys.readouterr().err.startswith("E_CONFIG: bulk.port = '-1': no port\n")
