from tests.rosters import a_file, topology
from weightd.core.roster.counts import CoverageCounts
from weightd.core.roster.explain import explain_counts, explain_topology


def test_slots_are_names_where_no_labels_are_given() -> None:
    lines = explain_topology(topology(a_file())).splitlines()

    assert lines[3].split() == ["E0", "3", "colocated", "n0", "0", "0-1", "1,", "2", "1-2"]


def test_permuted_trainers_keep_their_order() -> None:
    file = a_file(trainer_slots=[2, 3, 0, 1, 4], engines=[{"id": "E0", "slots": [0, 1, 2, 3, 4]}])
    lines = explain_topology(topology(file), file.labels()).splitlines()

    assert lines[3].endswith("2-3, 0")
    assert lines[4].endswith("1, 4")


def test_remote_engine_names_no_trainer_rank() -> None:
    file = a_file(trainer_slots=[0, 1], engines=[{"id": "E0", "slots": [3, 4]}], mode="disaggregated")
    text = explain_topology(topology(file), file.labels())

    assert "remote" in text
    assert "2 trainer ranks = 2 source only; 2 engine slots = 2 without a trainer rank" in text
    assert "reserved" not in text


def test_no_engines_are_a_sum_of_nothing() -> None:
    counts = CoverageCounts(2, 0, 2, 0, 0, 0, 0, 0, 0)

    assert explain_counts(counts) == "2 trainer ranks = 2 reserved; 0 engine slots = 0"
