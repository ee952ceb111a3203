"""Command lines are shown without secrets."""

import pytest

from labkit.watching.script import shown_command


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--epochs", "1", "--lr=0.1"], "--epochs 1 --lr=0.1"),
        (["--hub_token", "hf_abc", "x"], "--hub_token ... x"),
        (["--wandb-api-key=abc"], "--wandb-api-key=..."),
        (["password=abc", "--tokens-seen"], "password=... --tokens-seen"),
        (["https://me:secret@host/photos?sig=abc"], "'https://host/photos?...'"),
        (["--keys", "3"], "--keys 3"),
    ],
)  # fmt: skip
def test_secrets_are_left_out(arguments, shown):
    assert shown_command("train.py", arguments) == f"train.py {shown}"


def test_home_folders_are_left_out():
    assert shown_command("/home/somebody/train.py", [], is_module=False) == "~/train.py"
    assert shown_command("timm.train", [], is_module=True) == "-m timm.train"
