"""What tests of exercises share."""

import pytest

from labkit import course


@pytest.fixture
def said(capsys):
    """What a check of an answer prints."""

    def said(answer, judge):
        course.check(answer, judge)
        return capsys.readouterr().out

    return said
