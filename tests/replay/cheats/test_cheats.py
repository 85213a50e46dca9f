"""Cheats cost only their own rows, and get no speed-up that an honest kernel does not have."""

import sys

import pytest

from tests.replay.cheats.run import fooled, names, replay

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="stops processes and looks into /proc"),
]

FLAGS = {
    "leaves_settings": "changes torch.get_num_threads",
    "facts_of_another_call": "",
}
"""Cheats that only want to disturb others, with the flag of their rows."""
REASONS = {
    "other_dtype": "returned float64",
    "nothing": "not a tensor",
    "rows_of_neighbours": "a row of",
    "call_is_unreadable": "by no one",
    "another_call": "a question about",
    "blames_a_neighbour": "exited with code 3",
    "continued_by_the_system": "went on while others were timed",
}


@pytest.mark.parametrize("cheats", ["outputs", "alone"])
def test_cheats_are_found_and_disturb_no_other(cheats: str) -> None:
    found = replay(*names(cheats))
    for name in names(cheats):
        assert fooled(name, found) == ""
        (row,) = found[name]
        if name in FLAGS:
            assert row["status"] == "ok", row["reason"]
            assert FLAGS[name] in "; ".join(row["flags"])
        elif row["status"] != "ok":
            assert REASONS.get(name, "") in row["reason"]
