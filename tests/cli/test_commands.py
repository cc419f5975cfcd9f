"""Every verb is registered, and says in its help what it does."""

from __future__ import annotations

import click

from sharded_loader.cli.commands import command


def test_the_verbs_are_listed_with_a_sentence() -> None:
    assert sorted(command.commands) == ["bench", "demo", "doctor", "records"]
    assert [name for name, verb in command.commands.items() if not (verb.short_help or "").endswith(".")] == []


def test_every_option_is_explained() -> None:
    verbs = [*command.commands.values()]
    verbs += [inner for verb in verbs if isinstance(verb, click.Group) for inner in verb.commands.values()]
    options = [(verb.name, one) for verb in verbs for one in verb.params if isinstance(one, click.Option)]
    assert len(options) > 20
    assert [(name, one.name) for name, one in options if not (one.help or "").endswith(".")] == []
