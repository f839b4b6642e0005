from msgspec import structs

from tests.rosters import a_file, a_sizes_roster, live, sizes_only, topology
from weightd.core.roster.seating import declared_seating, declared_seats, measured_seating, seating_of


def test_seats_are_numbered_by_their_labels_where_all_are_numbers() -> None:
    seats = declared_seats(a_file(nodes={"n0": [10, 7], "n1": [3]}, trainer_slots=[7], engines=[]).roster)

    assert [(key, s.order, s.node) for key, s in seats.items()] == [("10", 10, "n0"), ("7", 7, "n0"), ("3", 3, "n1")]


def test_seats_are_numbered_as_declared_where_one_is_a_name() -> None:
    seats = declared_seats(a_file(nodes={"n0": [10, "a"], "n1": [3]}, trainer_slots=["z"], engines=[]).roster)

    assert [(key, s.order, s.node) for key, s in seats.items()] == [
        ("10", 0, "n0"),
        ("a", 1, "n0"),
        ("3", 2, "n1"),
        ("z", 3, None),
    ]


def test_half_a_declaration_is_no_seating() -> None:
    roster = a_file().roster
    no_slots = structs.replace(roster, engines=(structs.replace(roster.engines[0], slots=None),))

    assert declared_seating(structs.replace(roster, nodes=None)) is None
    assert declared_seating(structs.replace(roster, trainer_slots=None)) is None
    assert declared_seating(no_slots) is None
    assert declared_seating(roster) is not None


def test_measured_seating_waits_for_every_rank() -> None:
    file = a_file()
    present = {r.who: r for r in live(file)}
    seating = measured_seating(sizes_only(file.roster), present)

    assert seating is not None
    assert seating.node_slots == {"n0": 3, "n1": 2}
    assert measured_seating(sizes_only(file.roster), dict(list(present.items())[1:])) is None
    assert measured_seating(a_sizes_roster(1), {}) is None


def test_seating_of_a_topology_has_its_slots() -> None:
    seating = seating_of(topology(a_file()))

    assert [s.label for s in seating.trainers] == ["n0/0", "n0/1", "n0/2", "n1/3", "n1/4"]
    assert [s.order for s in seating.trainers] == [0, 1, 2, 3, 4]
    assert {s: r for r, s in enumerate(seating.trainers)} == seating.trainer_of
